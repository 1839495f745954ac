# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which container a process belongs to, known from outside: by its cgroup."""

from agent.containers.identity import identify, parse_cgroup
from agent.containers.index import ContainerIndex

__all__ = ["ContainerIndex", "identify", "parse_cgroup"]
