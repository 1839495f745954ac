# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The container image, made without an engine: its Debian packages, its layout as files, and what it has to be.

packaging/container/build.sh puts the parts together. Invariant: the same folders give the same digest.
"""
