# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Simulated nodes, containers, cgroups and agents: what bench, demo, conformance and tests share."""
