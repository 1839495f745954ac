# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes count exactly: a known load, in prime numbers, on real uprobes."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent import layout, libraries, preflight
from agent.collectors.deliveries import fresh
from agent.errors import ProbeError
from agent.model import ProcessId
from agent.probes import Probes
from agent.procfs import Procfs
from bench.containers import Container, Mount

HERE = Path(__file__).resolve().parent
SIM = HERE.parent.parent / "sim"
LIBCUDA = SIM / "build" / "lib" / "libcuda.so.1"
THREADS, PROCESSES, COUNT = 3, 5, 23


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exact") / "exact"
    command = ["gcc", "-std=gnu11", "-O1", f"-I{SIM}/include", str(HERE / "exact.c"), "-o", str(path)]
    subprocess.run([*command, f"-L{LIBCUDA.parent}", "-lcuda", "-lpthread"], check=True)
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("gpu")
    variables = {**os.environ, "GPUSIM_DIR": str(folder), "GPUSIM_GPUS": "2", "LD_LIBRARY_PATH": str(LIBCUDA.parent)}
    server = subprocess.Popen([SIM / "build/bin/gpusim", "serve"], env=variables, stdout=subprocess.PIPE)
    try:
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        yield variables
    finally:
        server.terminate()
        server.wait()
        assert server.stdout
        server.stdout.close()


@pytest.fixture
def probes() -> Iterator[Probes]:
    with Probes(preflight.bpf_object(), Procfs()) as probes:
        yield probes


class Driven:
    """A run of exact.c that waits for us before and after its calls."""

    def __init__(self, program: Path, environment: dict[str, str], *arguments: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([program, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True)
        self._expect("ready\n")
        self.id = Procfs().process_id(self._process.pid)

    def _expect(self, line: str) -> None:
        assert self._process.stdout
        assert self._process.stdout.readline() == line

    def go(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def drive(self) -> None:
        self.go()
        self._expect("done\n")

    def done(self) -> None:
        self._expect("done\n")

    def close(self) -> None:
        self._process.communicate("\n", timeout=20)


@pytest.fixture
def drive(program: Path, environment: dict[str, str]) -> Iterator[Callable[..., Driven]]:
    with ExitStack() as stack:

        def start(*arguments: object) -> Driven:
            driven = Driven(program, environment, *map(str, arguments))
            stack.callback(driven.close)
            return driven

        yield start


def entries(probes: Probes, name: str, process: ProcessId) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in probes.map(name).items() if key.process.id() == process]


def counted(probes: Probes, process: ProcessId) -> tuple[int, int]:
    rows = entries(probes, "launches", process)
    return sum(value.launches for _, value in rows), sum(value.blocks for _, value in rows)


@pytest.mark.parametrize("way", ["export", "proc"])
def test_23_launches_of_3_threads_of_5_processes_are_23_launches_each(
    probes: Probes, drive: Callable[..., Driven], way: str
) -> None:
    before = [drive(THREADS, COUNT, "launch", way) for _ in range(PROCESSES)]
    probes.ensure(str(LIBCUDA))
    after = [drive(THREADS, COUNT, "launch", way) for _ in range(PROCESSES)]
    for driven in (*before, *after):
        driven.go()
    for driven in (*before, *after):
        driven.done()
        assert counted(probes, driven.id) == (THREADS * COUNT, THREADS * COUNT * 21)
        ((_, value),) = entries(probes, "launches", driven.id)
        assert value.threads_per_block == 32 * 2 * 5
    assert not any(count for _, count in probes.lost())


@pytest.mark.parametrize("way", ["export", "proc"])
@pytest.mark.parametrize(("kind", "blocks"), [("config", 22), ("cooperative", 5), ("graph", 0)])
def test_every_way_of_launching_counts_once(
    probes: Probes, drive: Callable[..., Driven], kind: str, blocks: int, way: str
) -> None:
    probes.ensure(str(LIBCUDA))
    driven = drive(THREADS, COUNT, kind, way)
    driven.drive()
    assert counted(probes, driven.id) == (THREADS * COUNT, THREADS * COUNT * blocks)


@pytest.mark.parametrize("way", ["export", "proc"])
def test_memory_is_what_was_allocated_and_not_freed(probes: Probes, drive: Callable[..., Driven], way: str) -> None:
    probes.ensure(str(LIBCUDA))
    driven = drive(THREADS, COUNT, "memory", way)
    driven.drive()
    ((_, memory),) = entries(probes, "memory", driven.id)
    calls = THREADS * COUNT
    assert list(memory.live_bytes) == [calls << 20, 0, 0, 0]
    assert (memory.allocations, memory.frees, memory.failures) == (2 * calls, calls, THREADS)
    assert len(entries(probes, "allocations", driven.id)) == calls


def test_copies_are_counted_by_direction(probes: Probes, drive: Callable[..., Driven]) -> None:
    probes.ensure(str(LIBCUDA))
    driven = drive(THREADS, COUNT, "copies")
    driven.drive()
    found = {
        layout.COPY_DIRECTIONS[key.direction]: (value.bytes, value.calls)
        for key, value in entries(probes, "copies", driven.id)
    }
    calls = THREADS * COUNT
    assert found == {
        "host_to_device": (calls * 1009, calls),
        "device_to_host": (calls * 2003, calls),
        "memset": (calls * 404, calls),
    }


def test_each_request_is_one_latency_and_one_delivery(probes: Probes, drive: Callable[..., Driven]) -> None:
    probes.ensure(str(LIBCUDA))
    driven = drive(1, COUNT, "requests")
    driven.drive()
    key = layout.ProcessKey.of(driven.id)
    latency = probes.map("latencies").get(key)
    assert latency
    assert latency.count == sum(latency.buckets) == COUNT
    assert latency.sum_ns >= COUNT * 200_000
    ring = probes.map("delivered").get(key)
    assert ring
    assert ring.count == COUNT
    newest = list(fresh(driven.id, ring, 0))
    assert len(newest) == layout.DELIVERIES
    assert all(one.launches == 1 and one.elapsed_ns >= 200_000 for one in newest)


def test_launches_go_to_the_device_whose_context_is_current(probes: Probes, drive: Callable[..., Driven]) -> None:
    probes.ensure(str(LIBCUDA))
    driven = drive(THREADS, COUNT, "devices")
    driven.drive()
    by_device = {key.device: value.launches for key, value in entries(probes, "launches", driven.id)}
    assert by_device == {0: 2 * THREADS * COUNT, 1: 2 * THREADS * COUNT}


def test_a_struct_that_changed_is_noticed_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layout._MIRRORS, "launch_value", layout.MemoryValue)
    with pytest.raises(ProbeError, match="struct launch_value"), Probes(preflight.bpf_object(), Procfs()):
        pass


@pytest.mark.parametrize("layers_seen", [True, False], ids=["layers seen", "layers hidden"])
def test_two_containers_of_one_image_are_not_counted_twice(
    probes: Probes,
    program: Path,
    environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers_seen: bool,
) -> None:
    if not layers_seen:
        monkeypatch.setattr("agent.probes.layer_paths", lambda *_: [])
    image = tmp_path / "image"
    (image / "opt").mkdir(parents=True)
    shutil.copy(LIBCUDA, image / "opt" / "libcuda.so.1")
    variables = {"LD_LIBRARY_PATH": "/opt", "GPUSIM_DIR": environment["GPUSIM_DIR"]}
    mounts = [Mount(program), Mount(Path(environment["GPUSIM_DIR"]), read_only=False)]
    with ExitStack() as stack:
        containers = [
            stack.enter_context(
                Container.start(
                    f"twin{number}",
                    [str(program), str(THREADS), str(COUNT), "launch"],
                    variables,
                    cgroup_path=f"/docker/{secrets.token_hex(32)}",
                    mounts=mounts,
                    overlay_lower=image,
                    state=tmp_path / "state",
                )
            )
            for number in range(2)
        ]
        for container in containers:
            assert container.stdout
            assert container.stdout.readline() == "ready\n"
            probes.ensure("/opt/libcuda.so.1", container.tgid)
        for container in containers:
            container.stdin.write("\n")
            container.stdin.flush()
        for container in containers:
            assert container.stdout
            assert container.stdout.readline() == "done\n"
            assert counted(probes, Procfs().process_id(container.tgid))[0] == THREADS * COUNT
    assert len(probes.libraries()) == (1 if layers_seen else 2)
    assert (dict(probes.lost())["duplicate"] > 0) == (not layers_seen)


def test_the_same_file_through_two_paths_is_one_library(probes: Probes, tmp_path: Path) -> None:
    link = tmp_path / "libcuda.so.1"
    os.link(LIBCUDA, link) if os.stat(LIBCUDA).st_dev == os.stat(tmp_path).st_dev else link.symlink_to(LIBCUDA)
    assert probes.ensure(str(LIBCUDA)) is probes.ensure(str(link))


def test_layers_are_found_in_the_order_in_which_they_cover_each_other() -> None:
    line = "40 30 0:50 / / rw - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/up,workdir=/w"
    mounts = libraries.parse_mounts(line)
    assert libraries.layer_paths(mounts, "/usr/lib/libcuda.so.1") == [
        "/up/usr/lib/libcuda.so.1",
        "/l1/usr/lib/libcuda.so.1",
        "/l2/usr/lib/libcuda.so.1",
    ]
