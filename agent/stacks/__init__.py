# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden stacks`: which code of a container launches kernels or holds device memory.

An object and probes of its own, there only while the command runs: nothing of it is part of the agent's cost.
"""
