# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The write-ahead log of acts, and the lock on the run directory."""
