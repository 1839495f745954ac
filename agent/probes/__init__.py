# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes on libcuda: the BPF objects, their ABI, where they are attached, and the events they send."""
