# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Containers shorter than a tick, replaced libraries, GPUs and drivers that go and come back: under one agent."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.core import snapshot_json
from agent.core.model import ContainerUsage, DeviceUuid, Snapshot, Totals
from tests.e2e.node import PATIENCE_SECONDS, ROOT, Agent
from tests.e2e.places import Chronicle, Docker, Hardware, Place, docker, launches_of, place, rows_of
from tests.support.programs.driver import Driver, compile_driver
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

LAUNCH = "launch:4x1x1:32x1x1"
NAMED = "uuid:0"  # which device it is, for programs that may end before the agent reads their environment
SHORT_LIVED, AGENT_AWAY_SECONDS = 20, 1.0
STEP = 20  # launches that are waited for together
WORK = ("--kernels", str(STEP), "--kernel-us", "500", "--host-us", "2000", "--seconds", "3600")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Hardware]]:
    with place(tmp_path_factory.mktemp("place")) as (node, hardware):
        yield node, hardware


@pytest.fixture(scope="module")
def node(here: tuple[Place, Hardware]) -> Place:
    return here[0]


@pytest.fixture(scope="module")
def hardware(here: tuple[Place, Hardware]) -> Hardware:
    return here[1]


@pytest.fixture(scope="module")
def warden(node: Place) -> Iterator[Agent]:
    with node.agent(None) as agent:
        yield agent


@pytest.fixture(scope="module")
def chronicle(warden: Agent) -> Iterator[Chronicle]:
    with Chronicle(warden).kept() as chronicle:
        yield chronicle


@pytest.fixture(scope="module")
def driver(node: Place, hardware: Hardware) -> Driver:
    return Driver(compile_driver(node.folder), hardware.gpus, node.library)


@pytest.fixture(scope="module")
def newer_libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another build, as a driver upgrade brings: the same functions at other places."""
    return Path(shutil.copy(BUILD / "plain" / "libcuda.so.1", tmp_path_factory.mktemp("newer")))


def counter(agent: Agent, name: str, **labels: str) -> dict[str, float]:
    """The series of a metric with these labels, by GPU UUID."""
    families = text_string_to_metric_families(agent.metrics())
    samples = (sample for family in families for sample in family.samples if sample.name == name)
    return {s.labels["UUID"]: s.value for s in samples if all(s.labels.get(k) == v for k, v in labels.items())}


@contextmanager
def working(node: Place, container: Docker, device: str, *more: str) -> Iterator[int]:
    """The offline workload on one device, until the block ends or its driver goes away."""
    program = [str(BUILD / "bin" / "offline"), *WORK, *more]
    enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(container.cgroup)]
    environment = {**node.environment, "CUDA_VISIBLE_DEVICES": device}
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen([*enter, *program], env=environment, stdout=nowhere, stderr=nowhere)
    try:
        yield process.pid
    finally:
        process.terminate()  # it ends its step first, so the calls that it made are those that were done
        process.wait(timeout=PATIENCE_SECONDS)


def row(agent: Agent, container: Docker) -> ContainerUsage | None:
    found = rows_of(agent.snapshot(), container)
    return found[0] if found else None


# ---- short lives ----


def test_a_container_between_two_ticks_is_counted_under_its_id_until_it_was_scraped(
    node: Place, hardware: Hardware, warden: Agent, chronicle: Chronicle, driver: Driver
) -> None:
    full_id, folder = secrets.token_hex(32), driver.libcuda.parent
    with Container.start(
        f"short-{node.token}",
        [str(driver.program), NAMED, f"31*{LAUNCH}", "sync"],
        {**node.stage.environment, "LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0"},
        cgroup_path=f"/docker/{full_id}",
        mounts=[Mount(node.folder, read_only=False)],
        state=node.folder / "containers",
    ) as container:
        assert container.stdout
        assert container.stdout.readline().startswith("ready"), container.errors()
        container.stdin.write("go\n")
        container.stdin.close()
        assert container.wait(30)
    name, gpu = full_id[:12], hardware.uuids[0]
    metric = "gpuwarden_container_launches_total"
    until(lambda: counter(warden, metric, container=name) == {gpu: 31}, "its launches")
    assert counter(warden, metric, container=name, runtime="docker") == {gpu: 31}
    later = chronicle.after(time.monotonic_ns() + 2_000_000_000)  # ticks after it was scraped
    assert [row.container.id for row in later.ended if row.container.name == name] == [full_id]
    assert counter(warden, metric, container=name) == {gpu: 31}


def test_programs_that_are_gone_before_the_agent_can_look_are_counted_for_their_containers(
    hardware: Hardware, warden: Agent, chronicle: Chronicle, driver: Driver
) -> None:
    before = warden.snapshot().lost
    gone: dict[Docker, int] = {}
    with stopped(warden):
        for number in range(SHORT_LIVED):
            with docker() as container:
                count = 101 + number
                replace(driver, cgroup=container.cgroup).run(
                    NAMED, f"{count}*{LAUNCH}", CUDA_VISIBLE_DEVICES=str(number % 2)
                )
            assert not container.cgroup.exists()
            gone[container] = count
    shown = {container: {hardware.uuids[n % 2]: gone[container]} for n, container in enumerate(gone)}

    def found() -> dict[Docker, dict[DeviceUuid, int]]:
        return {one: launches_of(warden.snapshot(), one) for one in gone}

    until(lambda: found() == shown, lambda: f"all launches of all of them, not {found()} and {warden.snapshot().lost}")
    lost = warden.snapshot().lost
    for reason in ("launches:no_container", "map:event"):
        assert lost.get(reason, 0) == before.get(reason, 0), reason


@contextmanager
def stopped(agent: Agent) -> Iterator[None]:
    """For the length of the block and no shorter than an interval."""
    begun = time.monotonic()
    agent.process.send_signal(signal.SIGSTOP)
    try:
        yield
        # This long without the agent is what is tested.
        time.sleep(max(0.0, begun + AGENT_AWAY_SECONDS - time.monotonic()))
    finally:
        agent.process.send_signal(signal.SIGCONT)


def test_another_program_in_the_process_is_shown_under_its_own_command(
    hardware: Hardware, warden: Agent, driver: Driver
) -> None:
    with docker() as container:
        mine = replace(driver, cgroup=container.cgroup)
        operations = ("alloc:67108864", f"3*{LAUNCH}", "exec", "threads=2", "alloc:33554432", f"5*{LAUNCH}")
        with mine.start(*operations, CUDA_VISIBLE_DEVICES="1") as first:
            first.begin()
            second = first.again()
            second.begin()
            second.finish()
            gpu = hardware.uuids[1]
            until(lambda: launches_of(warden.snapshot(), container) == {gpu: 3 + 2 * 5}, "launches of both")
            until(lambda: "exec" not in command(warden, second.process.tgid), "the new command")
            assert "threads=2" in command(warden, second.process.tgid)
            used = row(warden, container)
            assert used is not None
            assert used.usage[0].memory_by_kind == {"plain": 2 * 33554432}


def command(agent: Agent, tgid: int) -> str:
    return next(one.process.command for one in agent.snapshot().processes if one.process.id.tgid == tgid)


# ---- libraries ----


def test_a_replaced_libcuda_is_watched_beside_the_old_one(
    node: Place, hardware: Hardware, warden: Agent, driver: Driver, newer_libcuda: Path
) -> None:
    gpu = hardware.uuids[0]
    with docker() as old, docker() as new:
        earlier = replace(driver, cgroup=old.cgroup)
        with earlier.start(f"41*{LAUNCH}", CUDA_VISIBLE_DEVICES="0") as early:
            libraries = watched(warden, node.library)
            swap(newer_libcuda, node.library)
            until(lambda: watched(warden, node.library) == libraries + 1, "the new file")
            with replace(driver, cgroup=new.cgroup).start(f"43*{LAUNCH}", CUDA_VISIBLE_DEVICES="0") as late:
                late.begin()
                early.begin()
                late.finish()
                early.finish()
                until(lambda: launches_of(warden.snapshot(), new) == {gpu: 43}, "launches with the new libcuda")
                until(lambda: launches_of(warden.snapshot(), old) == {gpu: 41}, "launches with the old libcuda")
    assert all(not probe.failed for probe in warden.snapshot().probes)


def watched(warden: Agent, library: Path) -> int:
    """How many files that have or had this name have probes."""
    return sum(str(library) in probe.library for probe in warden.snapshot().probes)


def swap(source: Path, target: Path) -> None:
    """As a package manager does it: another inode under the same name."""
    made = target.with_suffix(".new")
    shutil.copyfile(source, made)
    made.rename(target)


def test_a_libcuda_that_was_written_over_in_place_is_reattached(
    node: Place, hardware: Hardware, warden: Agent, driver: Driver
) -> None:
    gpu, inode = hardware.uuids[0], node.library.stat().st_ino
    log = len(warden.log.read_text())
    shutil.copyfile(BUILD / "lib" / "libcuda.so.1", node.library)  # other offsets than what the test before put there
    assert node.library.stat().st_ino == inode
    until(lambda: "symbols of" in warden.log.read_text()[log:].partition("in place")[2], "probes of the new file")
    with docker() as container:
        replace(driver, cgroup=container.cgroup).run(NAMED, f"47*{LAUNCH}", CUDA_VISIBLE_DEVICES="0")
        until(lambda: launches_of(warden.snapshot(), container) == {gpu: 47}, "launches with the new content")


def test_a_process_whose_libcuda_was_deleted_before_the_agent_started_is_counted(
    node: Place, hardware: Hardware, driver: Driver, tmp_path: Path
) -> None:
    library = tmp_path / "libcuda.so.1"
    shutil.copyfile(BUILD / "lib" / "libcuda.so.1", library)
    with docker() as container:
        mine = replace(driver, cgroup=container.cgroup, libcuda=library)
        with mine.start(f"53*{LAUNCH}", CUDA_VISIBLE_DEVICES="1") as driven:
            library.unlink()
            with node.agent(None, run_dir="late") as late:
                driven.begin()
                driven.finish()
                until(lambda: launches_of(late.snapshot(), container) == {hardware.uuids[1]: 53}, "its launches")


# ---- devices and drivers ----


def test_a_lost_gpu_hides_only_itself_and_comes_back(
    node: Place, hardware: Hardware, warden: Agent, chronicle: Chronicle
) -> None:
    well, ill = hardware.uuids[:2]
    with docker() as near, docker() as far, working(node, near, "0"), working(node, far, "1") as tgid:
        until(lambda: busy(warden, near, well) and busy(warden, far, ill), "both to be seen at work")
        hardware.gpus.fault("lose", "1")
        try:
            until(lambda: counter(warden, "gpuwarden_device_lost").get(ill) == 1, "the loss")
            assert counter(warden, "gpuwarden_device_lost")[well] == 0
            page = chronicle.after(time.monotonic_ns())
            assert {one.device.uuid for one in page.devices if one.lost} == {ill}
            before = launches_of(page, near)[well]
            until(lambda: launches_of(warden.snapshot(), near)[well] > before and busy(warden, near, well), "the other")
        finally:
            hardware.gpus.fault("restore", "1")
        until(lambda: counter(warden, "gpuwarden_device_lost")[ill] == 0, "its return")
        until(lambda: busy(warden, far, ill), "its figures")
    until(lambda: launches_of(warden.snapshot(), far) == {ill: truth(hardware, tgid)}, "exactly its launches")


def busy(agent: Agent, container: Docker, device: DeviceUuid) -> bool:
    """Whether the newest snapshot has SM time and launches of it there."""
    rows = [one for one in agent.snapshot().containers if one.container.key == container.key]
    return any(u.device == device and u.sm_ratio and u.launches_per_second for one in rows for u in one.usage)


def truth(hardware: Hardware, tgid: int) -> int:
    return sum(one["launches"] for one in hardware.gpus.truth() if one["pid"] == tgid)


def test_a_driver_that_is_reloaded_is_taken_up_again(
    node: Place, hardware: Hardware, warden: Agent, chronicle: Chronicle
) -> None:
    gpu = hardware.uuids[0]
    with docker() as before, docker() as after:
        with working(node, before, "0") as old:
            until(lambda: busy(warden, before, gpu), "work before")
            hardware.gpus.fault("driver-unload")
            try:
                until(lambda: all(one.lost for one in warden.snapshot().devices), "the loss of all")
                assert any("driver" in (one.error or "") for one in warden.snapshot().collectors)
            finally:
                hardware.gpus.fault("driver-load")
        with working(node, after, "0") as new:
            until(lambda: busy(warden, after, gpu), "work after")
            assert not any(one.lost for one in warden.snapshot().devices)
            assert not any(one.error for one in chronicle.after(time.monotonic_ns()).collectors)
        until(lambda: launches_of(warden.snapshot(), after) == {gpu: truth(hardware, new)}, "exactly its launches")
        undone = launches_of(warden.snapshot(), before)[gpu] - truth(hardware, old)
        assert 0 <= undone <= STEP  # calls that it made while the driver went away
    assert warden.process.poll() is None


def test_the_driver_decides_which_device_is_meant_when_a_program_renumbers_them_itself(
    hardware: Hardware, warden: Agent, driver: Driver
) -> None:
    with docker() as container:
        operations = ("visible=1,0", "uuid:0", "uuid:1", f"59*{LAUNCH}", "set:1", f"61*{LAUNCH}")
        with replace(driver, cgroup=container.cgroup).start(*operations, CUDA_VISIBLE_DEVICES="0,1") as driven:
            driven.begin()
            driven.finish()
            shown = {hardware.uuids[1]: 59, hardware.uuids[0]: 61}
            until(lambda: launches_of(warden.snapshot(), container) == shown, "launches on the right devices")


def test_a_process_on_a_mig_instance_is_shown_there_with_what_it_copies(
    node: Place, hardware: Hardware, warden: Agent, chronicle: Chronicle
) -> None:
    parent, instance = hardware.uuids[2], hardware.uuids[4]
    with docker() as container, working(node, container, instance, "--copy-bytes", "4MiB", "--memory", "1GiB"):
        until(lambda: busy(warden, container, instance), "its SM time")
        begun = chronicle.after(time.monotonic_ns())
        ended = chronicle.after(time.monotonic_ns() + 4_000_000_000)
        used = row(warden, container)
        assert used is not None
        assert [one.device for one in used.usage] == [instance]
        (memory,) = [one.memory_bytes for one in used.usage]
        assert memory is not None
        assert memory >= 1 << 30
        copied = received(ended, container) - received(begun, container)
        rest = unknown(ended, parent) - unknown(begun, parent)
        assert copied > 0
        assert rest < copied / 4


def received(snapshot: Snapshot, container: Docker) -> int:
    return sum(u.totals.pcie_rx_bytes for one in rows_of(snapshot, container) for u in one.usage)


def unknown(snapshot: Snapshot, device: DeviceUuid) -> int:
    return next(one.totals.pcie_rx_bytes for one in snapshot.unattributed if one.device == device)


# ---- kernels by name ----


def test_gputop_has_kernels_by_name_and_how_long_they_take(node: Place, hardware: Hardware, warden: Agent) -> None:
    gpu = hardware.uuids[0]
    with docker() as plain, docker() as graphs, working(node, plain, "0"), working(node, graphs, "1", "--graph", "10"):
        until(
            lambda: known(warden, plain, graphs=False) and known(warden, graphs, graphs=True), "how long kernels take"
        )
        program = [sys.executable, "-c", "from gpuwarden.main import gputop; gputop()"]
        command = [*program, "--once", "--json", "--socket", str(warden.socket)]
        done = subprocess.run(command, env=node.environment, cwd=ROOT, capture_output=True, text=True, check=True)
        snapshot = snapshot_json.loads(done.stdout.encode())
    assert json.loads(done.stdout)["containers"]
    (kernel,) = [one for one in rows_of(snapshot, plain)[0].functions if one.name == "spin"]
    assert (kernel.device, kernel.is_graph) == (gpu, False)
    assert kernel.gpu_seconds_per_launch == pytest.approx(500e-6, rel=0.5)
    (graph,) = [one for one in rows_of(snapshot, graphs)[0].functions if one.is_graph]
    assert graph.name == ""
    assert graph.gpu_seconds_per_launch == pytest.approx(10 * 500e-6, rel=0.5)


def known(agent: Agent, container: Docker, *, graphs: bool) -> bool:
    found = row(agent, container)
    return found is not None and any(one.gpu_seconds_per_launch for one in found.functions if one.is_graph == graphs)


# ---- all the while ----


def test_all_the_while_everything_added_up_and_no_total_jumped(chronicle: Chronicle) -> None:
    pages = [chronicle.pages[at] for at in sorted(chronicle.pages)]
    assert len(pages) > 10
    for page in pages:
        for reading in page.devices:
            check_sums(page, reading.device.uuid)
    for earlier, later in pairwise(pages):
        seconds = (later.at_ns - earlier.at_ns) / 1e9
        before = totals_of(earlier)
        for owner, after in totals_of(later).items():
            grown = Totals(
                *(now - then for now, then in zip(astuple(after), astuple(before.get(owner, after)), strict=True))
            )
            assert min(astuple(grown)) >= 0, owner
            assert grown.sm_seconds <= seconds * 1.001, owner


def totals_of(page: Snapshot) -> dict[tuple[str, DeviceUuid], Totals]:
    """By owner and device: the device itself, the rest, and each container that lives or whose end is not forgotten."""
    found = {("device", device): totals for device, totals in page.device_totals.items()}
    found |= {("rest", rest.device): rest.totals for rest in page.unattributed}
    rows = (*page.ended, *page.containers)
    return found | {(row.container.key, usage.device): usage.totals for row in rows for usage in row.usage}


def check_sums(page: Snapshot, device: DeviceUuid) -> None:
    """Containers and the rest are the device; of a GPU that is split, its instances' copies belong to it."""
    (reading,) = [one for one in page.devices if one.device.uuid == device]
    instances = [one.device.uuid for one in page.devices if one.device.parent == device]
    (rest,) = [one for one in page.unattributed if one.device == device]
    own = [u for one in page.containers for u in one.usage if u.device == device]
    wide = [u for one in page.containers for u in one.usage if u.device == device or u.device in instances]
    rx, tx = [u.pcie_rx_bytes_per_second for u in wide], [u.pcie_tx_bytes_per_second for u in wide]
    rx_excess, tx_excess = rest.pcie_rx_excess_bytes_per_second, rest.pcie_tx_excess_bytes_per_second
    for whole, parts, left, excess in (
        (reading.sm_activity_ratio, [u.sm_ratio for u in own], rest.sm_ratio, 0.0),
        (reading.memory_used_bytes, [u.memory_bytes for u in own], rest.memory_bytes, rest.memory_excess_bytes),
        (reading.pcie_rx_bytes_per_second, rx, rest.pcie_rx_bytes_per_second, rx_excess),
        (reading.pcie_tx_bytes_per_second, tx, rest.pcie_tx_bytes_per_second, tx_excess),
    ):
        assert (whole is None) == (left is None)
        if whole is not None and left is not None:
            assert left >= 0
            assert sum(part or 0 for part in parts) + left == pytest.approx(whole + (excess or 0), rel=1e-9, abs=1e-9)
