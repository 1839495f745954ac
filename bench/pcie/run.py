# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench pcie`: whether copies are shared by weight, and what an online copy waits for beside offline ones.

Shares: two offline containers copy 4 MB at a time to one device for as fast as they can, with weights 1:1, 1:2 and 1:4;
beside them what they get when nothing is paced. Latency: an online container copies 1 MB at a time, alone, and beside
an offline one that copies 4 MB or 64 MB at a time, uncontrolled and held. The bound is what the agent says: 0.5 ms of
offline copies, and one whole one. Both on a link whose copies in flight share it, and on one that carries one copy
after another, in several rounds; each is reported by its least, middle and greatest value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.core.errors import SetupError
from agent.probes.abi import LINK_QUEUE_NS
from bench.enforcement.agent import Agent, agent
from bench.latency.reaction_times import rank
from tools.harness.node import Node, compile_client, simulated_node
from tools.harness.stage import Cpus, Stage, Workload, open_stage
from tools.harness.wait import until

_BANDWIDTH: Final = 12e9  # of generation 3
_PAIRS: Final = ((1.0, 1.0), (1.0, 2.0), (1.0, 4.0))
_SHARED_BYTES, _ONLINE_BYTES = 4_000_000, 1_000_000
_BESIDE_BYTES: Final = (4_000_000, 64_000_000)
_IN_FLIGHT: Final = 8  # copies of one container
_PERIOD_US: Final = 4000
_SETTLE_SECONDS: Final = 2.5
_MOST_SHARE_ERROR: Final = 0.05
_MARGIN_NS: Final = 1_000_000
_LINKS: Final = {"shared": "0", "one after another": "1"}  # copies_at_once of the simulated GPU

_POLICY: Final = """\
version: 1
enforce: {enforce}
pcie: {{pace: {pace}}}
online:
  - name: service
    match: {{cgroup: "{path}/online/*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 100ms, window: 10s}}
offline:
  - name: one
    match: {{cgroup: "{path}/one/*"}}
    weight: {weights[0]}
    ladder: [pace]
  - name: two
    match: {{cgroup: "{path}/two/*"}}
    weight: {weights[1]}
    ladder: [pace]
"""


@dataclass(frozen=True, slots=True)
class CopyPolicy:
    """What a phase's policy says."""

    pace: bool
    weights: tuple[float, float] = (1.0, 1.0)

    def text(self, path: str, enforce: bool = True) -> str:
        """The policy's YAML."""
        flags = {"enforce": str(enforce).lower(), "pace": str(self.pace).lower()}
        return _POLICY.format(path=path, weights=self.weights, **flags)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all phases need."""

    stage: Stage[Node]
    warden: Agent
    program: Path
    seconds: float

    def load(self, side: str, copied: int) -> Workload:
        """A container that copies for as fast as it can."""
        return self.stage.run(side, [str(self.program), "load", str(copied), str(_IN_FLIGHT)])

    def take(self, policy: CopyPolicy) -> None:
        """From now on the agent goes by it."""
        if refused := self.warden.take(policy):
            raise SetupError(f"the agent does not take the policy: {refused}")

    def share(self, policy: CopyPolicy) -> float:
        """The first container's part of what both copied."""
        self.take(policy)
        both = [self.load(side, _SHARED_BYTES) for side in ("one", "two")]
        time.sleep(_SETTLE_SECONDS)  # until the agent knows both, and what they had before is forgotten
        before = [self._received(one) for one in both]
        time.sleep(self.seconds)
        first, second = (self._received(one) - had for one, had in zip(both, before, strict=True))
        self.stage.end(both)
        return first / (first + second)

    def latencies_ns(self, policy: CopyPolicy, beside: int | None) -> list[int]:
        """Of the online copies, beside an offline container that copies so many bytes at a time."""
        self.take(policy)
        count = round(self.seconds * 1e6 / _PERIOD_US)
        online = self.stage.run("online", [str(self.program), "probe", *map(str, (_ONLINE_BYTES, _PERIOD_US, count))])
        offline = [] if beside is None else [self.load("one", beside)]
        time.sleep(_SETTLE_SECONDS)
        self.stage.go(online)
        assert online.process.stdout
        took = [int(line) for line in online.process.stdout.read().split()]
        self.stage.end([online, *offline])
        if len(took) != count:
            raise SetupError(f"{len(took)} of {count} copies were recorded: run it again")
        return took

    def _received(self, workload: Workload) -> int:
        tgid = workload.process.pid
        return sum(int(row["rx_bytes"]) for row in self.stage.node.truth() if row["pid"] == tgid)


def compiled(folder: Path) -> Path:
    """Compiles the program of both sides."""
    return compile_client(Path(__file__).with_name("copier.c"), folder / "copier", "-O2")


def one_round(bench: Bench) -> dict[str, float]:
    """Figure → value: shares, and p99 in ns."""
    found = {"share uncontrolled": bench.share(CopyPolicy(pace=False))}
    for weights in _PAIRS:
        found[f"share {weights[0]:g}:{weights[1]:g}"] = bench.share(CopyPolicy(pace=True, weights=weights))
    found |= _quantiles("alone", bench.latencies_ns(CopyPolicy(pace=True), None))
    for beside in _BESIDE_BYTES:
        for what, pace in (("uncontrolled", False), ("held", True)):
            found |= _quantiles(f"{what} {beside}", bench.latencies_ns(CopyPolicy(pace=pace), beside))
    return found


def _quantiles(name: str, took: Sequence[int]) -> dict[str, float]:
    return {f"p50 {name}": rank(took, 0.5), f"p99 {name}": rank(took, 0.99)}


def measured(folder: Path, at_once: str, rounds: int, seconds: float) -> list[dict[str, float]]:
    """So many rounds on a node of its own."""
    cpus, config = Cpus.split(), {"copy_bandwidth": f"{_BANDWIDTH / 1e9:g}GB/s", "copies_at_once": at_once}
    folder.mkdir()
    program = compiled(folder)
    with simulated_node(folder / "gpu", config) as node, open_stage(node, folder, cpus) as stage:
        cpus.bind(node.server_tgid, online=True)
        with agent(stage, CopyPolicy(pace=False), isolated=True) as warden:
            until(lambda: warden.snapshot() is not None, "the agent to observe", error=SetupError)
            bench = Bench(stage, warden, program, seconds)
            return [one_round(bench) for _ in range(rounds)]


def spread(rounds: Sequence[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Figure → least, middle, greatest."""
    columns = {name: [found[name] for found in rounds] for name in rounds[0]}
    return {name: (min(column), statistics.median(column), max(column)) for name, column in columns.items()}


def bound_ns(copied: int) -> float:
    """What an online copy waits for at most."""
    return LINK_QUEUE_NS + copied / _BANDWIDTH * 1e9


def failures(rounds: Sequence[dict[str, float]]) -> list[str]:
    """The goals that a round misses: shares within 5 % of the weights, and p99 ≤ alone + bound + 1 ms."""
    missed = []
    for number, found in enumerate(rounds, 1):
        for first, second in _PAIRS:
            name, wanted = f"share {first:g}:{second:g}", first / (first + second)
            if abs(found[name] / wanted - 1) > _MOST_SHARE_ERROR:
                missed.append(f"round {number}: {name} is {found[name]:.3f}, not {wanted:.3f}")
        for copied in _BESIDE_BYTES:
            most, held = found["p99 alone"] + bound_ns(copied) + _MARGIN_NS, found[f"p99 held {copied}"]
            if held > most:
                late = f"{held / 1e6:.2f} ms, over {most / 1e6:.2f}"
                missed.append(f"round {number}: beside copies of {copied} bytes p99 is {late}")
    return missed


def lines(found: dict[str, tuple[float, float, float]]) -> list[str]:
    """The figures for people: minimum–median–maximum."""
    out = []
    for name, values in found.items():
        is_share = name.startswith("share")
        shown = "–".join(f"{value:.3f}" if is_share else f"{value / 1e6:.2f}" for value in values)
        beside = name.rpartition(" ")[2]
        judged = name.startswith("p99 held")
        goal = f" (alone + {(bound_ns(int(beside)) + _MARGIN_NS) / 1e6:.2f} at most)" if judged else ""
        out.append(f"{name}: {shown}" if is_share else f"online copy, {name}: {shown} ms{goal}")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every round on both links meets the goals."""
    parser = argparse.ArgumentParser(prog="python -m bench pcie", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each phase on each link (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a phase (default %(default)s)")
    parser.add_argument("--link", choices=list(_LINKS), help="only that one of the two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    document: dict[str, Any] = {"bandwidth": _BANDWIDTH, "rounds": options.rounds, "seconds": options.seconds}
    missed = []
    for link in [options.link] if options.link else _LINKS:
        with tempfile.TemporaryDirectory(prefix="gpuwarden-pcie-") as name:
            rounds = measured(Path(name) / "link", _LINKS[link], options.rounds, options.seconds)
        print("\n".join(f"pcie, link {link}: {line}" for line in lines(spread(rounds))), flush=True)
        document[link] = rounds
        missed += [f"pcie, link {link}: {one}" for one in failures(rounds)]
    print("\n".join(missed))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
