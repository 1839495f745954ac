# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Locks, saves and restores other processes' CUDA work with the node's own driver library (cuCheckpointProcess…).

`__main__` is a short-lived program of its own: the driver's library is never loaded into the agent or the guardian,
which it could hang or crash. `helper` starts it, one at a time for each process that is acted on, and undoes its acts.
"""
