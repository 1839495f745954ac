# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which containers share which GPUs, as pure data made of a kind and a seed: what attribution is measured on.

The same kind and seed give the same scenario on every machine, and any seed gives a plausible one: so nothing can
have been tuned to the scenarios of a seed that was not known then. Launches are few enough for two cores to simulate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Final

from bench.attribution.scenarios_load import LONGEST_US, SHORTEST_US, Demand, batch, jobs, service


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container: a workload of sim/ and its arguments; with `jobs` ever new containers, one after another."""

    name: str
    program: str
    arguments: tuple[str, ...]
    percentage: int | None = None  # of the SMs, under MPS
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    instance: int | None = None  # a MIG instance that it has to itself or shares, by the simulated GPU's own number
    jobs: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run of it needs."""

    kind: str
    seed: int
    gpus: int
    mps: bool
    tenants: tuple[Tenant, ...]
    clients_credited: bool = False  # NVML has a figure for each MPS client; R580 takes it for the MPS server's
    mig: str = ""  # how GPUs are divided, as the simulator's setting
    older: bool = False  # the workloads run before the agent starts: it saw none make its contexts and graphs
    restarted: bool = False  # the agent ends after the warm-up; what the next one says is measured, from its start


def scenario(kind: str, seed: int) -> Scenario:
    """The scenario of that kind and seed. KeyError: no such kind."""
    return KINDS[kind](kind, seed, Random(f"{kind}/{seed}"))


def _loads(random: Random, count: int, sharers: int) -> list[Demand]:
    """What each of `count` tenants asks for; together between a half of the device and more than there is."""
    parts = [random.uniform(0.3, 1.0) for _ in range(count)]
    together = random.uniform(0.6, 1.7)
    return [Demand(together * part / sum(parts), sharers) for part in parts]


def _some(random: Random, name: str, demand: Demand, percentage: int | None = None) -> Tenant:
    """A batch or a service, by chance."""
    if random.random() < 0.5:
        return Tenant(f"batch-{name}", "offline", batch(random, demand), percentage)
    return Tenant(f"service-{name}", "online", service(random, demand), percentage)


def _time_sliced(kind: str, seed: int, random: Random) -> Scenario:
    one, other = _loads(random, 2, 2)
    tenants = (
        Tenant("batch", "offline", batch(random, one)),
        _some(random, "other", other),
    )
    return Scenario(kind, seed, 1, False, tenants)


def _mps(count: int) -> Callable[[str, int, Random], Scenario]:
    def make(kind: str, seed: int, random: Random) -> Scenario:
        demands = _loads(random, count, count)
        percentages = [random.randint(100 // count // 2, min(100, 200 // count)) for _ in demands]
        tenants = [
            _some(random, str(i), demand, p) for i, (demand, p) in enumerate(zip(demands, percentages, strict=True))
        ]
        return Scenario(kind, seed, 1, True, tuple(tenants))

    return make


def _clients_credited(kind: str, seed: int, random: Random) -> Scenario:
    return replace(_mps(3)(kind, seed, random), clients_credited=True)


def _graphs(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 3)
    mps = random.random() < 0.5
    tenants = (
        Tenant("graphs-batch", "offline", batch(random, one, graph=True)),
        Tenant("graphs-service", "online", service(random, two, graph=True)),
        Tenant("batch", "offline", batch(random, three)),
    )
    return Scenario(kind, seed, 1, mps, tenants)


def _drift(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 3)
    slowly = ("--drift", _factor(random), "--drift-seconds", f"{random.uniform(20, 60):.1f}")
    suddenly = ("--drift", _factor(random), "--drift-seconds", f"{random.uniform(6, 15):.1f}", "--drift-jumps")
    tenants = (
        Tenant("drifting", "offline", batch(random, one) + slowly),
        Tenant("jumping", "offline", batch(random, two) + suddenly),
        Tenant("steady", "online", service(random, three)),
    )
    return Scenario(kind, seed, 1, random.random() < 0.5, tenants)


def _factor(random: Random) -> str:
    return f"{random.choice([random.uniform(0.3, 0.6), random.uniform(1.6, 3.0)]):.2f}"


def _never_waits(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 3)
    if random.random() < 0.5:  # it launches whenever the driver lets it
        one = Demand(1.0, one.sharers)
    tenants = (
        Tenant("never-waits", "offline", (*batch(random, one), "--never-sync")),
        Tenant("service", "online", service(random, two)),
        Tenant("batch", "offline", batch(random, three)),
    )
    return Scenario(kind, seed, 1, random.random() < 0.5, tenants)


def _autograd(kind: str, seed: int, random: Random) -> Scenario:
    one, two = _loads(random, 2, 2)
    tenants = (
        Tenant("training", "offline", (*batch(random, one), "--backward")),
        _some(random, "other", two),
    )
    return Scenario(kind, seed, 1, random.random() < 0.5, tenants)


def _two_gpus(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 4)
    devices = random.choice(["0,1", "1,0", "0,0,1", "0,1,1"])  # twice the same: two streams, and more work there
    tenants = (
        Tenant("both", "offline", (*batch(random, one), "--devices", devices)),
        Tenant("second", "offline", batch(random, two), visible="1"),
        Tenant("first", "online", service(random, three)),
    )
    return Scenario(kind, seed, 2, False, tenants)


def _short_jobs(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 3)
    tenants = (
        Tenant("jobs-a", "offline", jobs(random, one), jobs=True),
        Tenant("jobs-b", "offline", jobs(random, two), jobs=True),
        Tenant("service", "online", service(random, three)),
    )
    return Scenario(kind, seed, 1, random.random() < 0.5, tenants)


def _functions(kind: str, seed: int, random: Random) -> Scenario:
    demands = [Demand(demand.ratio / 2, 3) for demand in _loads(random, 3, 3)]  # the device idles at times
    tenants = (
        Tenant("batch-a", "offline", batch(random, demands[0], functions=random.randint(6, 40))),
        Tenant("batch-b", "offline", batch(random, demands[1], functions=random.randint(6, 40))),
        Tenant("service", "online", service(random, demands[2], functions=random.randint(6, 40))),
    )
    return Scenario(kind, seed, 1, random.random() < 0.5, tenants)


def _mixed_lengths(kind: str, seed: int, random: Random) -> Scenario:
    """Kernels of a few microseconds beside such as last a hundred times as long, and both in one program."""
    one, two, three = _loads(random, 3, 3)
    tenants = (
        Tenant("short", "offline", batch(random, one, lengths=(SHORTEST_US, 60.0))),
        Tenant("long", "offline", batch(random, two, lengths=(2000.0, LONGEST_US))),
        Tenant("service", "online", service(random, three, functions=random.randint(6, 20))),
    )
    return Scenario(kind, seed, 1, random.random() < 0.5, tenants)


def _mig(kind: str, seed: int, random: Random) -> Scenario:
    """Two share the larger instance of a GPU, one has the smaller one; another GPU is whole."""
    one, two, three, four = _loads(random, 4, 4)
    tenants = (
        Tenant("batch", "offline", batch(random, one), instance=1),
        replace(_some(random, "beside", two), instance=1),
        Tenant("alone", "offline", batch(random, three), instance=2),
        Tenant("whole", "online", service(random, four), visible="1"),
    )
    return Scenario(kind, seed, 2, False, tenants, mig="0:3g.40gb,2g.20gb")


def _unseen(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 3)
    tenants = (
        Tenant("unseen", "offline-static", batch(random, one)),
        Tenant("batch", "offline", batch(random, two)),
        Tenant("service", "online", service(random, three)),
    )
    return Scenario(kind, seed, 1, False, tenants)


def _older(kind: str, seed: int, random: Random) -> Scenario:
    one, two, three = _loads(random, 3, 4)
    tenants = (
        Tenant("graphs-batch", "offline", batch(random, one, graph=True)),
        Tenant("graphs-service", "online", service(random, two, graph=True)),
        Tenant("both", "offline", (*batch(random, three), "--devices", "0,1")),
    )
    return Scenario(kind, seed, 2, False, tenants, older=True)


def _restarted(kind: str, seed: int, random: Random) -> Scenario:
    return replace(_older(kind, seed, random), older=False, restarted=True)


KINDS: Final[Mapping[str, Callable[[str, int, Random], Scenario]]] = MappingProxyType(
    {
        "time-sliced-2": _time_sliced,
        "mps-2": _mps(2),
        "mps-4": _mps(4),
        "mps-8": _mps(8),
        "mps-clients-credited": _clients_credited,
        "graphs": _graphs,
        "drift": _drift,
        "never-waits": _never_waits,
        "autograd": _autograd,
        "two-gpus": _two_gpus,
        "short-jobs": _short_jobs,
        "many-functions": _functions,
        "mixed-lengths": _mixed_lengths,
        "mig": _mig,
        "unseen": _unseen,
        "older": _older,
        "restarted": _restarted,
    }
)
ASKED_FOR: Final = ("mps-clients-credited",)  # only run by name: not what drivers of today do
