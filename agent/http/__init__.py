# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Latencies of the HTTP/1 requests that containers answer, from the system calls of their processes.

An object and probes of its own, there only while somebody wants to know: they cost every system call of the node.
"""
