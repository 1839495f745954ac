# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Locking, saving and restoring another process: the calls one by one, and what they do to it and to others."""
