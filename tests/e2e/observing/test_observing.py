# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What people see of real containers: Prometheus, gputop, and figures that add up and agree with the truth."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.containers.identity import identify, parse_cgroup
from agent.core import snapshot_json
from agent.core.model import Snapshot
from tests.e2e.node import ROOT, Agent, Node
from tests.e2e.prometheus import CONFIG, Prometheus
from tools.harness import cgroups
from tools.harness.containers import Container
from tools.harness.node import BUILD
from tools.harness.wait import until

SERVING = ("--rate", "50", "--kernels", "20", "--kernel-us", "200", "--seconds", "3600", "--start-now")

LEARNING = ("--kernels", "40", "--kernel-us", "250", "--host-us", "2000", "--copy-bytes", "4MiB", "--seconds", "3600")

TICKS = 4


@pytest.fixture(scope="module")
def pair(node: Node, warden: Agent) -> Iterator[tuple[str, str]]:
    """The names of two containers that share the GPU, one of them copying too. None is held."""
    warden.reload(node.policy(enforce=False))
    with (
        node.container("chat-pair", "online", SERVING),
        node.container("training-pair", "offline", (*LEARNING, "--memory", "1GiB")),
    ):
        names = node.name("chat-pair"), node.name("training-pair")
        until(lambda: all(sm_ratio(warden.snapshot(), name) for name in names), "SM figures of both containers")
        yield names


def sm_ratio(snapshot: Snapshot, name: str) -> float:
    rows = [row for row in snapshot.containers if row.container.name == name]
    return sum(usage.sm_ratio or 0.0 for row in rows for usage in row.usage)


def gputop(node: Node, *arguments: str) -> str:
    program = [sys.executable, "-c", "from gpuwarden.main import gputop; gputop()"]
    done = subprocess.run(
        [*program, *arguments], env=node.environment, cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def snapshots(agent: Agent, count: int) -> list[Snapshot]:
    found: dict[int, Snapshot] = {}

    def enough() -> bool:
        snapshot = agent.snapshot()
        found[snapshot.at_ns] = snapshot
        return len(found) >= count

    until(enough, f"{count} snapshots")
    return list(found.values())


def test_a_real_prometheus_has_the_figures_of_both_containers(
    warden: Agent, pair: tuple[str, str], tmp_path: Path
) -> None:
    scraper = Prometheus(tmp_path, CONFIG.format(port=warden.port))
    try:
        for name in pair:
            (ratio,) = scraper.until(f'gpuwarden_container_sm_ratio{{container="{name}"}} > 0')
            assert float(ratio["value"][1]) <= 1
            assert ratio["metric"]["runtime"] == "runc"
            scraper.until(f'increase(gpuwarden_container_launches_total{{container="{name}"}}[10s]) > 0')
        scraper.until(
            "abs(sum(gpuwarden_container_sm_ratio) + sum(gpuwarden_unattributed_sm_ratio)"
            " - sum(gpuwarden_device_sm_ratio)) < 0.000001"
        )
    finally:
        scraper.close()


def test_promtool_finds_nothing_wrong_with_the_agents_metrics(warden: Agent, pair: tuple[str, str]) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "install Debian's package prometheus"
    text = warden.metrics()
    assert all(f'container="{name}"' in text for name in pair)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_gputop_asks_the_agent_and_shows_both_containers(node: Node, warden: Agent, pair: tuple[str, str]) -> None:
    shown = gputop(node, "--by-container", "--once", "--socket", str(warden.socket))
    for name in pair:
        (line,) = [line for line in shown.split("\n") if name in line]
        assert re.search(r" runc .* ~?\d+\.\d ", line), line  # its SM share, worked out or measured
    document = gputop(node, "--json", "--once", "--socket", str(warden.socket))
    snapshot = snapshot_json.loads(document.encode())
    assert {row.container.name for row in snapshot.containers} >= set(pair)
    assert json.loads(document)["version"] == 1


def test_gputop_observes_by_itself_where_no_agent_runs(node: Node, pair: tuple[str, str], tmp_path: Path) -> None:
    def launching() -> bool:
        document = gputop(node, "--json", "--once", "--socket", str(tmp_path / "none.sock"))
        rows = {row.container.name: row.usage for row in snapshot_json.loads(document.encode()).containers}
        return all(sum(usage.launches_per_second or 0 for usage in rows.get(name, ())) > 0 for name in pair)

    until(launching, "launches of both containers in the one tick that it shows")


def sums(snapshot: Snapshot) -> Iterator[tuple[float, float, float, float]]:
    """Of each figure of each device: the device's, all containers' together, what is left, and the excess."""
    for reading in snapshot.devices:
        device = reading.device.uuid
        (rest,) = [rest for rest in snapshot.unattributed if rest.device == device]
        usage = [u for row in snapshot.containers for u in row.usage if u.device == device]
        tx, rx = [u.pcie_tx_bytes_per_second for u in usage], [u.pcie_rx_bytes_per_second for u in usage]
        tx_excess, rx_excess = rest.pcie_tx_excess_bytes_per_second, rest.pcie_rx_excess_bytes_per_second
        wholes = (
            (reading.sm_activity_ratio, [u.sm_ratio for u in usage], rest.sm_ratio, 0.0),
            (reading.memory_used_bytes, [u.memory_bytes for u in usage], rest.memory_bytes, 0),
            (reading.pcie_tx_bytes_per_second, tx, rest.pcie_tx_bytes_per_second, tx_excess),
            (reading.pcie_rx_bytes_per_second, rx, rest.pcie_rx_bytes_per_second, rx_excess),
        )
        for whole, parts, left, excess in wholes:
            assert whole is not None
            assert left is not None
            assert excess is not None
            yield whole, sum(part or 0 for part in parts), left, excess


def test_containers_and_the_unattributed_rest_add_up_to_the_device_in_every_snapshot(
    warden: Agent, pair: tuple[str, str]
) -> None:
    for snapshot in snapshots(warden, TICKS):
        for whole, together, left, excess in sums(snapshot):
            assert left >= 0
            assert together + left == pytest.approx(whole + excess, rel=1e-9, abs=1e-9)

    def next_to_no_excess() -> bool:
        snapshot = warden.snapshot()
        busy = all(sm_ratio(snapshot, name) > 0 for name in pair)
        return busy and all(excess <= 0.05 * together for _, together, _, excess in sums(snapshot))

    until(next_to_no_excess, "a snapshot that counts nothing twice; one may be read late")


def counted_until_gone(agent: Agent, containers: Sequence[Container]) -> dict[str, int]:
    """Launches as last shown, container by container."""
    names = {container.name for container in containers}

    def ended() -> dict[str, int] | None:
        rows = [row for row in agent.snapshot().ended if row.container.name in names]
        counted = {row.container.name: sum(usage.totals.launches for usage in row.usage) for row in rows}
        return counted if counted.keys() == names and not any(one.alive() for one in containers) else None

    return until(ended, "the containers to end")


def test_launches_are_counted_exactly(node: Node, warden: Agent) -> None:
    serving = ("--requests", "200", "--rate", "100", "--kernels", "25", "--kernel-us", "20", "--start-now")
    learning = ("--steps", "60", "--kernels", "100", "--kernel-us", "20", "--jitter", "0.5")
    with ExitStack() as stack:
        containers = [
            stack.enter_context(node.container("chat-counted", "online", serving)),
            stack.enter_context(node.container("training-counted", "offline", learning)),
        ]
        counted = counted_until_gone(warden, containers)
    truth = node.truth()
    assert counted == {container.name: truth[container.tgid] for container in containers}
    assert counted[node.name("chat-counted")] >= 200 * 25
    assert counted[node.name("training-counted")] >= 60 * 100


@contextmanager
def unit(name: str) -> Iterator[Path]:
    """A cgroup as systemd makes one for a service; v2, which counts wherever it is mounted."""
    root = next(root for root in cgroups.hierarchies() if (root / "cgroup.controllers").exists())
    made = [root / "system.slice", root / "system.slice" / name]
    made = [folder for folder in made if not folder.exists()]
    for folder in made:
        folder.mkdir()
    try:
        yield made[-1]
    finally:
        for folder in reversed(made):
            until(lambda: not (folder / "cgroup.procs").read_text(), f"{folder} to be empty")  # noqa: B023
            folder.rmdir()


@contextmanager
def outside_any_container(node: Node, cgroup: Path | None = None) -> Iterator[int]:
    program = [str(BUILD / "bin" / "offline"), *LEARNING]
    enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup)] if cgroup else []
    process = subprocess.Popen([*enter, *program], env=node.environment, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def name_of_owner(agent: Agent, tgid: int) -> tuple[str, str] | None:
    """The runtime and name of what a process is shown under."""
    for row in agent.snapshot().containers:
        if any(process.tgid == tgid for process in row.processes):
            return row.container.runtime, row.container.name
    return None


def test_a_process_outside_any_container_is_shown_as_the_host(node: Node, warden: Agent) -> None:
    ours, of_init = (parse_cgroup(Path(f"/proc/{tgid}/cgroup").read_text()) for tgid in ("self", "1"))
    expected = identify(ours, of_init)  # "host" wherever the tests themselves run outside of units and containers
    with outside_any_container(node) as tgid:
        until(lambda: name_of_owner(warden, tgid), "the process to be seen")
        assert name_of_owner(warden, tgid) == (expected.runtime, expected.name)


def test_a_process_of_a_systemd_unit_is_shown_under_its_name(node: Node, warden: Agent) -> None:
    name = f"trainer-{node.token}.service"
    with unit(name) as cgroup, outside_any_container(node, cgroup) as tgid:
        until(lambda: name_of_owner(warden, tgid), "the process to be seen")
        assert name_of_owner(warden, tgid) == ("systemd", name)
