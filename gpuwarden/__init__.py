# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The commands, one file each: the composition root. It imports everything and is imported by nothing."""
