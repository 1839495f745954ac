# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The names of signals, laws and ladder rungs that a policy may use.

Kept apart from their implementations so that `gpuwarden check` needs none of them; a test holds the two lists together.
An SLO or a law that does not exist here is refused. A rung that is only planned is accepted with a warning: a ladder
that ends early does less to a workload, never more.
"""

from __future__ import annotations

SIGNALS = ("gpu_wait", "http", "prometheus", "uprobe")
LAWS = ("headroom", "fixed", "tgs", "off")
RUNGS = ("pace", "gate", "freeze", "evict")

PLANNED_RUNGS = ("deny", "mps", "lock", "swap")

MEMORY_RUNGS = ("deny", "swap", "evict")  # those that act on a memory quota

# What `slo` may say beside the keys that every signal has, and what of it each signal cannot do without.
SIGNAL_KEYS: dict[str, tuple[str, ...]] = {
    "gpu_wait": (),
    "http": ("port", "path"),
    "prometheus": ("url", "metric", "labels", "unit"),
    "uprobe": ("binary", "symbol", "offset", "nothrow"),
}
NEEDED_KEYS: dict[str, tuple[str, ...]] = {
    "gpu_wait": (),
    "http": ("port",),
    "prometheus": ("url", "metric"),
    "uprobe": ("binary",),
}
UNITS_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000}  # of a histogram's `le`
