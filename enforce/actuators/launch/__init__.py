# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rungs that act on launches in the kernel: gate, pace and hold."""
