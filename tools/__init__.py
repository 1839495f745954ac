# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What serves development: the simulated node's harness, the manual, shipping."""
