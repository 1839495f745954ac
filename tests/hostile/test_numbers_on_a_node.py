# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A whole node with a tenant whose libcuda takes every number: reported, all other totals exact."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from agent.core.model import ContainerUsage
from tests.e2e.node import TRAINING, Agent, Node
from tests.hostile.programs import compile_program, pretended_libcuda
from tools.harness.containers import Container, Mount
from tools.harness.wait import until

_MOST_KERNELS_SECOND, _MOST_KERNELS_AT_ONCE = 1 << 23, 1 << 27  # agent/attribution/counters.py
_MOST_BYTES = 1 << 46


def liar(node: Node, folder: Path) -> Container:
    folder.mkdir()
    pretended_libcuda(folder)
    program = compile_program("big_numbers", folder)
    name = node.name("liar")
    return Container.start(
        name,
        [str(program), "wait", "sizes", "graph", "grids", "ordinals"],
        {"LD_LIBRARY_PATH": str(folder)},
        cgroup_path=f"/gpuwarden-e2e/{name}",
        mounts=[Mount(folder)],
        state=node.folder / "containers",
    )


def launches(row: ContainerUsage | None) -> int:
    return sum(usage.totals.launches for usage in row.usage) if row else 0


def is_reported(agent: Agent) -> bool:
    lost = agent.snapshot().lost
    return lost.get("map:bounds", 0) > 0 and lost.get("map:ordinal", 0) > 0


def test_numbers_that_no_device_has_are_reported_and_leave_the_others_totals_exact(node: Node, tmp_path: Path) -> None:
    shutil.rmtree(node.folder / "usage.sqlite", ignore_errors=True)
    with node.agent(None) as agent, node.container("training-honest", "offline", TRAINING) as honest:
        until(lambda: launches(agent.container(honest.name)) > 100, "the honest one's launches")
        began = time.monotonic()
        with liar(node, tmp_path / "liar") as attacker:
            assert attacker.stdout
            until(lambda: any("liar" in one.library for one in agent.snapshot().probes), "its library to be probed")
            attacker.stdin.write("\n")
            attacker.stdin.flush()
            assert attacker.stdout.readline() == "done\n"
            until(lambda: is_reported(agent), "the lies to be reported")
            assert 'gpuwarden_events_lost_total{reason="bounds",source="map"}' in agent.metrics().replace(
                'source="map",reason="bounds"', 'reason="bounds",source="map"'
            )
            row = agent.container(attacker.name)
            seconds = time.monotonic() - began
            assert launches(row) <= _MOST_KERNELS_AT_ONCE + _MOST_KERNELS_SECOND * seconds
            for usage in row.usage if row else ():
                assert 0 <= (usage.memory_bytes or 0) <= _MOST_BYTES
        honest.stop()
        truth = node.truth()[honest.tgid]
        until(lambda: _final(agent, honest.name) == truth, f"{truth} launches of the honest one")
    found = node.run("report", *node.ledger, "--json", "--by", "container")
    assert (found.returncode, found.stderr) == (0, "")
    rows = {one["container"]: one["launches"] for one in json.loads(found.stdout)["rows"]}
    assert rows[honest.name] == truth
    assert rows.get(attacker.name, 0) < 1 << 62


def _final(agent: Agent, name: str) -> int:
    snapshot = agent.snapshot()
    rows = [one for one in (*snapshot.containers, *snapshot.ended) if one.container.name == name]
    return max((launches(one) for one in rows), default=0)
