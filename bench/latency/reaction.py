# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench reaction`: how fast the gate shuts, and how fast the loop gives offline work a smaller share.

The gate: from the call of the online side's first launch to the return of the last offline launch that came through,
over bursts of an online program beside one that launches all the time. That is an upper bound: a launch that had been
let through before and returned late counts too. The loop: from the moment at which the p99 of the online side's last
second is over its target, because an offline workload has begun, to the decision that gives less.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agent.core.errors import SetupError
from bench.enforcement.agent import Agent, Promise, agent
from bench.enforcement.pairs import SERVICE
from bench.latency.reaction_times import gate_reactions_ns, rank, tightened_at_ns, violated_at_ns
from tools.harness.node import Node, compile_client, simulated_node
from tools.harness.stage import Cpus, Stage, open_stage
from tools.harness.wait import until
from tools.harness.workloads import RESNET_LIKE

_SPACING_US: Final = 50
_RATE: Final = 250.0  # half of the GPU's time
_TARGET_NS: Final = 3_000_000  # requests of 2 ms
_QUIET_SECONDS: Final = 1.5
_STEP_SECONDS: Final = 6.0


def compiled(folder: Path) -> Path:
    """Compiles the program of both sides."""
    return compile_client(Path(__file__).with_suffix(".c"), folder / "reaction", "-O2")


def gate(stage: Stage[Node], warden: Agent, program: Path, bursts: int) -> list[int]:
    """Measures the gate: reactions in ns, one for each burst."""
    _require(warden.take(Promise("headroom", "gpu_wait", 0, 1e9, 10.0, ladder=("gate",))))
    times = stage.folder / "returned"
    online = stage.run("online", [str(program), "online", str(bursts)])
    offline = stage.run("offline", [str(program), "offline", str(times), str(_SPACING_US)])
    time.sleep(_QUIET_SECONDS)  # the agent knows both after a tick or two
    stage.go(online)
    assert online.process.stdout
    lines = online.process.stdout.read().decode().splitlines()
    _require(warden.take(Promise("headroom", "gpu_wait", 0, 1e9, 10.0), enforce=False))
    stage.end([online, offline])
    recorded = times.read_bytes()
    returned = [at for at in struct.unpack(f"{len(recorded) // 8}Q", recorded) if at]
    rows = [(int(begun), int(ended)) for begun, ended in (line.split() for line in lines)]
    if len(rows) != bursts or not returned:
        raise SetupError(f"{len(rows)} of {bursts} bursts and {len(returned)} launches were recorded: run it again")
    return gate_reactions_ns(rows, returned)


def step(stage: Stage[Node], warden: Agent) -> tuple[int, int, int] | None:
    """ns from the offline side's first launch to the violation, from there to the decision that gives less, and from
    the first late request to that decision. None: the target was not missed."""
    _require(warden.take(Promise("headroom", "gpu_wait", 0, _TARGET_NS, 10.0, ladder=("pace",))))
    log, summary = stage.folder / "requests.log", stage.folder / "online.json"
    arguments = ["--rate", str(_RATE), "--seconds", str(_QUIET_SECONDS + _STEP_SECONDS), "--iterations-per-us", "100"]
    online = stage.start("online", [*SERVICE, *arguments, "--log", str(log), "--json", str(summary)])
    stage.go(online)
    time.sleep(_QUIET_SECONDS)  # the online side alone: a part of what is measured
    begun_ns = time.monotonic_ns()
    offline = stage.start("offline", [*RESNET_LIKE, "--iterations-per-us", "100", "--seconds", "0"])
    until(lambda: online.process.poll() is not None, "the online service to end", error=SetupError)
    stage.end([online, offline])
    to_wall_ns = time.time_ns() - time.monotonic_ns()
    started_ns = int(json.loads(summary.read_text())["started_monotonic_ns"])
    rows = [[float(word) * 1e9 for word in line.split()] for line in log.read_text().splitlines()]
    served = [(started_ns + int(arrival + latency), int(service)) for arrival, latency, service in rows]
    with_offline = [request for request in served if request[0] >= begun_ns]
    violated = violated_at_ns(with_offline, _TARGET_NS)
    late = next((ended for ended, service in with_offline if service > _TARGET_NS), None)
    if violated is None or late is None:
        return None
    decided = tightened_at_ns(_decisions(warden), begun_ns + to_wall_ns)
    if decided is None:
        raise SetupError("the target was missed and nothing was decided: see the agent's log")
    decided -= to_wall_ns
    return violated - begun_ns, max(0, decided - violated), decided - late


def _decisions(warden: Agent) -> list[dict[str, Any]]:
    if not warden.decisions.exists():
        return []
    lines = (json.loads(line) for line in warden.decisions.read_text().split("\n")[:-1])
    return [line for line in lines if line["kind"] == "decision"]


def _require(refused: str) -> None:
    if refused:
        raise SetupError(f"the agent does not take the policy: {refused}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; there is no bound to miss."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency.reaction", description=__doc__)
    parser.add_argument("--bursts", type=int, default=1000, help="for the gate (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="for the loop (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpuwarden-reaction-") as name:
        folder, cpus = Path(name), Cpus.split()
        program = compiled(folder)
        with simulated_node(folder / "gpu") as node, open_stage(node, folder, cpus) as stage:
            cpus.bind(node.server_tgid, online=True)
            with agent(stage, Promise("headroom", "gpu_wait", 0, 1e9, 10.0), isolated=True) as warden:
                gates = gate(stage, warden, program, options.bursts)
                steps = [found for _ in range(options.steps) if (found := step(stage, warden)) is not None]
    figures = _figures(gates, steps)
    print("\n".join(f"reaction: {line}" for line in _lines(figures, options.steps)))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _figures(gates: Sequence[int], steps: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "gate_median_us": rank(gates, 0.5) / 1e3,
        "gate_p99_us": rank(gates, 0.99) / 1e3,
        "gate_max_us": max(gates) / 1e3,
        "bursts": len(gates),
        "steps": len(steps),
    }
    for index, part in enumerate(("to_violation", "violation_to_share", "late_request_to_share")):
        values = [step[index] for step in steps]
        out[f"{part}_median_ms"] = rank(values, 0.5) / 1e6 if values else None
        out[f"{part}_max_ms"] = max(values) / 1e6 if values else None
    return out


def _lines(found: dict[str, Any], tried: int) -> list[str]:
    out = [
        f"gate: last offline launch let through {found['gate_median_us']:.0f} µs after the online side's first launch "
        f"in the median, {found['gate_p99_us']:.0f} µs p99, {found['gate_max_us']:.0f} µs at most, over "
        f"{found['bursts']} bursts (offline launches are {_SPACING_US} µs apart or more)"
    ]
    if not found["steps"]:
        return [*out, f"loop: the target was missed in none of {tried} steps"]
    return [
        *out,
        f"loop: smaller share {found['violation_to_share_median_ms']:.0f} ms after the last second's p99 was over the "
        f"target (median of {found['steps']} steps, {found['violation_to_share_max_ms']:.0f} ms at most), "
        f"{found['late_request_to_share_median_ms']:.0f} ms after the first late request "
        f"({found['late_request_to_share_max_ms']:.0f} ms at most)",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
