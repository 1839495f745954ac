# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Why a container was slowed: the last hour's decisions as intervals, kept by the agent and shown to people."""
