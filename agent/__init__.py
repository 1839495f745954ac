# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Observe: who uses how much of which GPU. Never imports `enforce`."""
