# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The smallest things of a GPU and its driver: what sim/workloads/constants.c reports of them, by name and unit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from agent.core.errors import SetupError
from conformance.host import Host


@dataclass(frozen=True, slots=True)
class Constant:
    """`key`: in what the program says; `what` and `unit`: of the row."""

    key: str
    what: str
    unit: str
    note: str = ""


CONSTANTS: Final = (
    Constant("launch_ns", "a launch, on the calling thread", "ns", "into a stream that has work, and room"),
    Constant("smallest_kernel_ns", "an empty kernel, from one to the next", "ns", "all of them queued"),
    Constant("launch_and_wait_ns", "launch, kernel and return of the wait", "ns", "one after another"),
    Constant("queue_depth", "launches that a stream takes in before one waits", ""),
    Constant("to_device_bytes_per_second", "copy to the device, pinned", "bytes/s", "64 MiB"),
    Constant("to_host_bytes_per_second", "copy to the host, pinned", "bytes/s", "64 MiB"),
    Constant("spin_10000_ns", "a kernel that was asked for 10 µs", "ns", "132 blocks of 1,024 threads, warm"),
    Constant("spin_100000_ns", "a kernel that was asked for 100 µs", "ns", "132 blocks of 1,024 threads, warm"),
    Constant("spin_1000000_ns", "a kernel that was asked for 1 ms", "ns", "132 blocks of 1,024 threads, warm"),
    Constant("spin_10000000_ns", "a kernel that was asked for 10 ms", "ns", "132 blocks of 1,024 threads, warm"),
    Constant("ragged_ns", "284 blocks of 50 µs, a wave and a bit", "ns", "alone on an SM a block runs twice as fast"),
)
_ROUNDS: Final = 9
_QUICK_ROUNDS: Final = 1


def constants(host: Host, *, quick: bool = False) -> Iterator[tuple[Constant, float | None]]:
    """Each, and its figure; None for a queue whose end was not found. SetupError when the program fails.

    `quick`: once, as in a quick run.
    """
    rounds = _QUICK_ROUNDS if quick or host.quick else _ROUNDS
    done = host.run([str(host.workloads / "constants"), "--rounds", str(rounds)], timeout=40.0)
    if done.returncode:
        raise SetupError(f"constants ended with {done.returncode}: {done.stderr.strip()[-300:] or 'it output nothing'}")
    yield from read(json.loads(done.stdout))


def read(output: dict[str, Any]) -> Iterator[tuple[Constant, float | None]]:
    """Constants and their figures, from the program's output."""
    for constant in CONSTANTS:
        figure = float(output[constant.key])
        yield constant, figure or None
