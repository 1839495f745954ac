# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Arguments of the workloads in sim/, drawn so that one asks for about a given share of a device of 132 SMs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Final

SHORTEST_US: Final = 20.0
LONGEST_US: Final = 5000.0
MOST_LAUNCHES_PER_SECOND: Final = 12000  # of all that share a node: more, and two cores cannot keep up
_SMS = 132
_THREADS_PER_SM = 2048
_FOR_EVER = ("--seconds", "100000")
_UNCALIBRATED = ("--iterations-per-us", "100")  # a simulated kernel lasts as long as it says


@dataclass(frozen=True, slots=True)
class Demand:
    """`ratio`: share of the device's time that one asks for when alone. `sharers`: who else launches on the node."""

    ratio: float
    sharers: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """`launch_us`: what a launch takes on a device of its own."""

    launch_us: float
    arguments: tuple[str, ...]


def batch(
    random: Random,
    demand: Demand,
    *,
    functions: int | None = None,
    graph: bool = False,
    lengths: tuple[float, float] = (SHORTEST_US, LONGEST_US),
) -> tuple[str, ...]:
    """`offline`, for ever: steps of many launches and a wait, then a pause. Some bound their queue, some copy.

    `lengths`: of a launch, in µs, least and most; within a graph they are short.
    """
    per_launch = random.randint(5, 200) if graph else 1
    kernel = _kernel(random, functions, *((SHORTEST_US, 300.0) if graph else lengths))
    launch_us = kernel.launch_us * per_launch
    launches = _launches(launch_us, _log_uniform(random, 2_000, 80_000))
    step_us = launches * launch_us
    share = min(demand.ratio, 0.97, _most_share(demand, launch_us))
    host_us = max(0.0, step_us * (1 / share - 1))
    steps = ("--kernels", str(launches), "--host-us", f"{host_us:.0f}")
    graphs = ("--graph", str(per_launch)) if graph else ()
    depth = ("--depth", str(random.randint(4, 64))) if random.random() < 0.25 else ()
    copies = ("--copy-bytes", f"{random.randint(1, 32)}MiB") if random.random() < 0.25 else ()
    return (*kernel.arguments, *steps, *graphs, *depth, *copies, *_jitter(random), *_FOR_EVER)


def service(random: Random, demand: Demand, *, functions: int | None = None, graph: bool = False) -> tuple[str, ...]:
    """`online`, for ever: requests that arrive when they do, each waited for."""
    kernel = _kernel(random, functions, SHORTEST_US, 300.0 if graph else 1000.0)
    launches = random.randint(5, 200) if graph else _launches(kernel.launch_us, _log_uniform(random, 1_000, 30_000))
    request_us = launches * kernel.launch_us
    share = min(demand.ratio, 0.6, 1.0 if graph else _most_share(demand, kernel.launch_us))
    rate = share * 1e6 / request_us
    requests = ("--kernels", str(launches), "--rate", f"{rate:.2f}", *(("--graph",) if graph else ()))
    return (*kernel.arguments, *requests, *_jitter(random), *_FOR_EVER, "--start-now")


def jobs(random: Random, demand: Demand) -> tuple[str, ...]:
    """`offline` for 300 ms."""
    kernel = _kernel(random, None, SHORTEST_US, 1000.0)
    launches = _launches(kernel.launch_us, _log_uniform(random, 1_000, 20_000))
    share = min(demand.ratio, 0.97, _most_share(demand, kernel.launch_us))
    host_us = max(0.0, launches * kernel.launch_us * (1 / share - 1))
    steps = ("--kernels", str(launches), "--host-us", f"{host_us:.0f}")
    return (*kernel.arguments, *steps, *_jitter(random), "--seconds", "0.3")


def _kernel(random: Random, functions: int | None, shortest_us: float, longest_us: float) -> Kernel:
    threads = random.choice([256, 512, 1024])
    wave = _SMS * (_THREADS_PER_SM // threads)
    blocks = round(_log_uniform(random, 24, 4 * wave))
    waves = math.ceil(blocks / wave)
    launch_us = _log_uniform(random, shortest_us, longest_us)
    shape = ("--kernel-us", f"{launch_us / waves:.1f}", "--blocks", str(blocks), "--threads", str(threads))
    count = functions or random.choice([1, 2, 3, 5, 8])
    seed = ("--seed", str(random.randrange(1 << 32)))
    return Kernel(launch_us, (*shape, "--functions", str(count), *seed, *_UNCALIBRATED))


def _launches(launch_us: float, step_us: float) -> int:
    return max(1, min(1000, round(step_us / launch_us)))


def _most_share(demand: Demand, launch_us: float) -> float:
    return MOST_LAUNCHES_PER_SECOND / demand.sharers * launch_us / 1e6


def _jitter(random: Random) -> tuple[str, ...]:
    return ("--jitter", f"{random.choice([0.0, random.uniform(0.05, 0.5)]):.2f}")


def _log_uniform(random: Random, least: float, most: float) -> float:
    return math.exp(random.uniform(math.log(least), math.log(most)))
