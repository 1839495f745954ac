# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A gang simulator of a cluster in which two jobs may share a GPU: what a policy sees, the event loop, its results."""
