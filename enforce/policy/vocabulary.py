# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The names of signals, laws and ladder rungs that a policy may use.

Kept apart from their implementations so that `gpuwarden check` needs none of them; a test holds the two lists together.
An SLO or a law that does not exist here is refused. A rung that is only planned is accepted with a warning: a ladder
that ends early does less to a workload, never more.
"""

from __future__ import annotations

SIGNALS = ("gpu_wait",)
LAWS = ("headroom", "fixed", "tgs", "off")
RUNGS = ("pace", "gate", "freeze", "evict")

PLANNED_SIGNALS = ("http", "prometheus", "uprobe")
PLANNED_RUNGS = ("deny", "mps", "lock", "swap")

MEMORY_RUNGS = ("deny", "swap", "evict")  # those that act on a memory quota
