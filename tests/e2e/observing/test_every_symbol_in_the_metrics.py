# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container calls every probed symbol; what a scrape reports of it is what it did, call by call and byte by byte."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.probes.symbols import SYMBOLS
from tests.e2e.node import Agent, Node
from tests.support.programs import every_symbol_calls as calls
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

KINDS = ("plain", "managed", "pool", "virtual", "array", "graph", "pinned")
CALLS = "gpuwarden_probe_calls_total"


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        """Parses it."""
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def by(self, metric: str, label: str, **wanted: str) -> dict[str, int]:
        """Its values by one label."""
        rows = [sample for sample in self.samples if sample.name == metric and wanted.items() <= sample.labels.items()]
        return {sample.labels[label]: int(sample.value) for sample in rows}

    def lost(self) -> dict[tuple[str, str], int]:
        """Events lost so far by source and reason."""
        rows = [sample for sample in self.samples if sample.name == "gpuwarden_events_lost_total"]
        return {(sample.labels["source"], sample.labels["reason"]): int(sample.value) for sample in rows}


@pytest.fixture(scope="module")
def every_symbol(node: Node) -> Path:
    return calls.build(node.folder / "every_symbol")


def settled(warden: Agent) -> dict[str, int]:
    """Calls of each symbol, once those of programs that have just ended are in."""
    latest = warden.snapshot()

    def is_as_before() -> bool:
        nonlocal latest
        before, latest = latest, warden.snapshot()
        return latest.at_ns != before.at_ns and latest.probe_calls == before.probe_calls

    until(is_as_before, "two snapshots with the same calls", step_seconds=0.1)
    return dict(latest.probe_calls)


def test_a_scrape_shows_exactly_what_was_called(node: Node, warden: Agent, every_symbol: Path) -> None:
    name = node.name(f"calls-{time.monotonic_ns()}")  # totals of a first try would go on
    plan = calls.plan_of([symbol.name for symbol in SYMBOLS])
    before, lost_before = settled(warden), Scrape(warden.metrics()).lost()
    with Container.start(
        name,
        [str(every_symbol), "3"],
        node.stage.environment,
        cgroup_path=f"/gpuwarden-e2e/{name}",
        mounts=[Mount(BUILD), Mount(node.folder, read_only=False)],
        state=node.folder / "containers",
    ) as container:
        assert container.stdout
        calls.prepare(container.stdin, container.stdout, plan)
        report = calls.carry_out(container.stdin, container.stdout)
        wanted, added = calls.reported(report), report["added"]

        def counted() -> dict[str, int]:
            return calls.grown(Scrape(warden.metrics()).by(CALLS, "symbol"), before)

        until(lambda: sum(counted().values()) >= sum(wanted.values()), "as many calls as were made")
        assert counted() == wanted
        scrape = Scrape(warden.metrics())
        here = {"container": name, "gpu": "0"}

        def value(metric: str) -> int:
            return scrape.by(f"gpuwarden_container_{metric}", "container", **here)[name]

        assert value("launches_total") == added["launch"]["amount"]
        assert value("pcie_receive_bytes_total") == added["to_device"]["amount"]
        assert value("pcie_transmit_bytes_total") == added["to_host"]["amount"]
        left = {kind: added[f"alloc_{kind}"]["amount"] - added[f"free_{kind}"]["amount"] for kind in KINDS}
        left["plain"] -= added["free_with_context"]["amount"]
        allocated = scrape.by("gpuwarden_container_allocated_bytes", "kind", **here)
        assert {kind: amount for kind, amount in allocated.items() if amount} == {k: v for k, v in left.items() if v}
        lost = scrape.lost()
        assert lost
        lost.pop(("libraries", "refused"), None)  # a process 1 that not even root may read
        assert {what: count for what, count in lost.items() if count > lost_before.get(what, 0)} == {}
