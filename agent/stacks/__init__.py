# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden stacks`: which code of a container launches kernels or holds device memory.

It has a BPF object and probes of its own, loaded only while the command runs, so it costs the agent nothing.
"""
