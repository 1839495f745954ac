# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undoes the acts of an agent that died or hangs: the guardian, its supervisor, the backstop and the standby."""
