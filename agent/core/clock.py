# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Time, so that everything else can take it as an argument.

All `_ns` values in the product are CLOCK_MONOTONIC, the clock of bpf_ktime_get_ns(), unless the name says `wall`.
"""

import time

NS_PER_SECOND = 1_000_000_000


def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in ns: comparable with timestamps taken inside the kernel."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """CLOCK_REALTIME in ns: for logs, and for NVML, whose samples carry it."""
    return time.time_ns()
