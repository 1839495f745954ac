# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the item `attribution` is made of: containers with known work, the agent beside them, and how far off it is.

How shares are taken from what was recorded, and the errors, are those of bench/attribution*.py.
"""
