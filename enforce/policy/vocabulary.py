# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The names of signals, laws and ladder rungs that a policy may use.

Kept apart from their implementations so that `gpuwarden check` needs none of them; a test holds the two lists together.
Whatever is not here is refused.
"""

from __future__ import annotations

SIGNALS = ("gpu_wait", "http", "prometheus", "uprobe")
LAWS = ("headroom", "fixed", "tgs", "off")
RUNGS = ("pace", "gate", "deny", "hold", "freeze", "mps", "lock", "swap", "evict")

MEMORY_RUNGS = ("deny", "hold", "swap", "evict")  # those that keep limits.memory and online[].reserve

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
