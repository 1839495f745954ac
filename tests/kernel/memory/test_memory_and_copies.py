# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Live bytes by kind, and bytes copied by direction: exactly what the program allocated, freed and copied."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from agent.collectors.memory import Allocations
from agent.core.model import ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from agent.probes.symbols import SYMBOLS, SymbolRole
from tests.support.programs.driver import Driver, Memory, copied, lost, memory
from tools.harness.node import BUILD

MIB = 1 << 20
THROUGH = pytest.mark.parametrize("through", ["symbol", "pointer"])
STREAMS = pytest.mark.parametrize("streams", ["legacy", "per-thread"])
COPIES = {  # operation → direction, bytes for an argument of one
    "copy_htod": ("host_to_device", 1),
    "copy_htod_async": ("host_to_device", 1),
    "copy_dtoh": ("device_to_host", 1),
    "copy_dtoh_async": ("device_to_host", 1),
    "copy_dtod": ("device_to_device", 1),
    "copy_dtod_async": ("device_to_device", 1),
    "copy_peer": ("device_to_device", 1),
    "copy_peer_async": ("device_to_device", 1),
    "copy_unified": ("host_to_device", 1),
    "copy_unified_async": ("host_to_device", 1),
    "prefetch": ("host_to_device", 1),
    "set8": ("memset", 1),
    "set8_async": ("memset", 1),
    "set16": ("memset", 2),
    "set16_async": ("memset", 2),
    "set32": ("memset", 4),
    "set32_async": ("memset", 4),
}
RECTANGLES = {
    "rect_htod": "host_to_device",
    "rect_htod_async": "host_to_device",
    "rect_dtoh": "device_to_host",
    "rect_dtoh_async": "device_to_host",
    "rect_htod_unaligned": "host_to_device",
    "rect_htod_half_unified": "host_to_device",  # the host's side is named, the other has to be asked for
    "rect_dtoh_half_unified": "device_to_host",
}


@STREAMS
@THROUGH
@pytest.mark.parametrize(
    ("allocate", "free", "kind"),
    [
        ("alloc", "free", "plain"),
        ("alloc_managed", "free", "managed"),
        ("alloc_async", "free_async", "pool"),
        ("alloc_pool", "free_async", "pool"),
        ("create", "release", "virtual"),
    ],
)
def test_live_bytes_are_what_was_allocated_and_not_freed(
    driver: Driver, probes: LibcudaProbes, allocate: str, free: str, kind: str, through: str, streams: str
) -> None:
    sizes = (2 * MIB, 4 * MIB, 10 * MIB, 6 * MIB)
    driven = driver.run(
        f"through={through}", f"streams={streams}", *(f"{allocate}:{size}" for size in sizes), f"2*{free}"
    )
    assert memory(probes, driven.process) == {
        0: Memory({kind: sizes[0] + sizes[1]}, allocations=4, frees=2, failures=0, peak=sum(sizes))
    }


def test_a_pitched_allocation_counts_with_its_padding(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("alloc_pitch:1000:7")
    assert memory(probes, driven.process)[0].live == {"plain": 1024 * 7}


def test_everything_freed_leaves_nothing_live(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(
        "threads=3", "alloc:1000", "alloc_managed:3000", "alloc_async:7000", "free_async", "free", "free"
    )
    assert memory(probes, driven.process)[0].live == {}
    assert memory(probes, driven.process)[0].frees == 9


def test_what_did_not_fit_counts_as_a_failure_and_not_as_memory(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"alloc:{MIB}", f"5*alloc_too_much:{4096 * MIB}")
    assert memory(probes, driven.process) == {0: Memory({"plain": MIB}, allocations=1, frees=0, failures=5, peak=MIB)}


def test_a_free_that_fails_frees_nothing(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"alloc:{MIB}", "release_wrong")
    assert memory(probes, driven.process)[0].live == {"plain": MIB}


def test_each_device_has_its_own_memory(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("alloc:1000", "set:1", "alloc:3000", "alloc:5000", "set:0", "free")  # frees the 5000 on 1
    found = memory(probes, driven.process)
    assert {device: entry.live for device, entry in found.items()} == {0: {"plain": 1000}, 1: {"plain": 3000}}


def test_physical_memory_is_on_the_device_that_was_asked_for(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"create:{2 * MIB}:1", f"create:{4 * MIB}:0")
    found = memory(probes, driven.process)
    assert {device: entry.live for device, entry in found.items()} == {
        0: {"virtual": 4 * MIB},
        1: {"virtual": 2 * MIB},
    }


@STREAMS
@THROUGH
def test_copies_are_counted_by_direction_with_their_bytes(
    driver: Driver, probes: LibcudaProbes, through: str, streams: str
) -> None:
    wanted: dict[tuple[int, str], tuple[int, int]] = {}
    operations = [f"alloc:{MIB}"]
    for number, (name, (direction, width)) in enumerate(COPIES.items()):
        calls, size = number + 2, 1009 + 16 * number
        operations.append(f"{calls}*{name}:{size}")
        before = wanted.get((0, direction), (0, 0))
        wanted[0, direction] = before[0] + calls, before[1] + calls * size * width
    for number, (name, direction) in enumerate(RECTANGLES.items()):
        calls, width, height = number + 2, 101 + number, 13 + number
        operations.append(f"{calls}*{name}:{width}:{height}")
        before = wanted.get((0, direction), (0, 0))
        wanted[0, direction] = before[0] + calls, before[1] + calls * width * height
    driven = driver.run(f"through={through}", f"streams={streams}", *operations)
    assert copied(probes, driven.process) == wanted


def test_copies_go_to_the_device_that_is_current(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"alloc:{MIB}", "2*copy_htod:1009", "set:1", f"alloc:{MIB}", "3*copy_htod:2003")
    assert copied(probes, driven.process) == {
        (0, "host_to_device"): (2, 2 * 1009),
        (1, "host_to_device"): (3, 3 * 2003),
    }


def test_lists_of_copies_and_prefetches_are_counted_one_by_one(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"alloc:{MIB}", "copy_list_3d:7", "copy_array_3d", "prefetch_list:6")
    shapes = [(10 + i) * 3 * 2 for i in range(7)]  # to, from and on the device, by turns
    texture = 5 * 3 * 4 * 4  # of four channels of four bytes
    assert copied(probes, driven.process) == {
        (0, "host_to_device"): (3 + 3, sum(shapes[0::3]) + 100 + 101 + 102),
        (0, "device_to_host"): (2 + 1 + 3, sum(shapes[1::3]) + texture + 103 + 104 + 105),
        (0, "device_to_device"): (2, sum(shapes[2::3])),
    }


def test_what_a_list_holds_beyond_the_first_64_is_counted_as_lost(
    driver: Driver, fresh_probes: LibcudaProbes, tmp_path: Path
) -> None:
    own = replace(driver, libcuda=Path(shutil.copy(driver.libcuda, tmp_path)))  # which no other test watches
    fresh_probes.ensure(str(own.libcuda))
    driven = own.run(f"alloc:{MIB}", "prefetch_list:66", "copy_list_3d:65")
    assert sum(calls for calls, _ in copied(fresh_probes, driven.process).values()) == 64 + 64
    assert lost(fresh_probes) == {"batch": 2}


@pytest.mark.parametrize(
    ("operations", "live", "frees"),
    [
        (f"create:{4 * MIB} map:{4 * MIB} release", 4 * MIB, 0),
        (f"create:{4 * MIB} map:{4 * MIB} release unmap:{4 * MIB}", 0, 1),
        (f"create:{4 * MIB} map:{4 * MIB} unmap:{4 * MIB}", 4 * MIB, 0),
        (f"create:{4 * MIB} map:{4 * MIB} release unmap_wrong", 4 * MIB, 0),
        (f"create:{4 * MIB} 2*map:{2 * MIB} release unmap:{2 * MIB}", 4 * MIB, 0),
        (f"create:{4 * MIB} 2*map:{2 * MIB} release 2*unmap:{2 * MIB}", 0, 1),
        (f"create:{2 * MIB} map:{2 * MIB} create:{4 * MIB} map:{4 * MIB} 2*release unmap:{6 * MIB}", 0, 2),
        (f"create:{2 * MIB} map:{2 * MIB} retain release unmap:{2 * MIB}", 2 * MIB, 0),
        (f"create:{2 * MIB} map:{2 * MIB} retain 2*release unmap:{2 * MIB}", 0, 1),
        (f"create:{2 * MIB} share release", 2 * MIB, 0),
        (f"create:{2 * MIB} share 2*release", 0, 1),
    ],
)
def test_physical_memory_lives_until_its_last_handle_and_mapping_are_gone(
    driver: Driver, probes: LibcudaProbes, operations: str, live: int, frees: int
) -> None:
    driven = driver.run(*operations.split())
    found = memory(probes, driven.process)[0]
    assert found.live == ({"virtual": live} if live else {})
    assert found.frees == frees
    mapped = [key for key, _ in probes.map("mappings").items() if key.process.id() == driven.process]
    assert not frees or not mapped


def test_mappings_go_with_the_process_and_with_its_program(driver: Driver, probes: LibcudaProbes) -> None:
    with driver.start("threads=0", f"create:{2 * MIB}", f"map:{2 * MIB}", "release", "exec", "alloc:4096") as driven:
        driven.begin()
        again = driven.again()
        again.begin()
        again.finish()
        assert memory(probes, driven.process)[0].live == {"plain": 4096}
        assert not [key for key, _ in probes.map("mappings").items() if key.process.id() == driven.process]
    left = driver.run(f"create:{2 * MIB}", f"map:{2 * MIB}", "release")
    collector = Allocations(probes)
    list(collector.collect(0))
    collector.forget([left.process])
    assert not [key for key, _ in probes.map("mappings").items() if key.process.id() == left.process]


def test_what_is_allocated_in_a_green_context_is_its_devices_and_goes_with_the_primary_one(
    driver: Driver, probes: LibcudaProbes
) -> None:
    held = driver.run("green:1", "alloc:4096", "pop", "green_destroy")
    assert memory(probes, held.process)[1].live == {"plain": 4096}
    gone = driver.run("green:1", "alloc:4096", "pop", "release_primary:1", "green_destroy")
    assert memory(probes, gone.process)[1].live == {}


def test_nothing_was_lost_on_the_way(probes: LibcudaProbes) -> None:
    assert not lost(probes)


def test_copies_and_sets_that_are_any_node_of_a_graph_are_counted_at_each_launch(
    driver: Driver, probes: LibcudaProbes
) -> None:
    driven = driver.run("alloc:4096", "graph_nodes:5:1000")
    assert copied(probes, driven.process) == {(0, "host_to_device"): (5, 5000), (0, "memset"): (5, 5000)}


def test_an_address_that_is_given_out_again_is_live_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tuple(symbol for symbol in SYMBOLS if symbol.role is not SymbolRole.FREE)
    monkeypatch.setattr("agent.probes.libcuda.SYMBOLS", seen)  # as if it were freed by an unknown call
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as blind:
        blind.ensure(str(driver.libcuda))
        driven = driver.run("register:4096", "unregister", "register:4096")
        assert memory(blind, driven.process)[0].live == {"pinned": 4096}


PEER_COPIES = (
    "peer",
    "peer_async",
    "peer_3d",
    "peer_3d_async",
    "peer_unified_3d",
    "peer_unified_3d_async",
    "peer_unified",
    "peer_unified_async",
    "peer_dtod",
    "peer_dtod_async",
    "peer_list",
)


def peer_bytes_of(driver: Driver, process: ProcessId) -> dict[tuple[int, str], int]:
    """(device, direction) → bytes, as the simulated GPUs did it; only what is not 0."""
    command = [str(BUILD / "bin" / "gpusim"), "truth"]
    environment = {**os.environ, **driver.node.environment}
    lines = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.splitlines()
    entries = [entry for entry in map(json.loads, lines) if entry["pid"] == process.tgid]
    found = {(one["device"], "to_peer"): one["peer_tx_bytes"] for one in entries}
    found |= {(one["device"], "from_peer"): one["peer_rx_bytes"] for one in entries}
    return {key: size for key, size in found.items() if size}


@pytest.mark.parametrize("operation", PEER_COPIES)
def test_a_copy_between_two_devices_is_traffic_of_both(driver: Driver, probes: LibcudaProbes, operation: str) -> None:
    with driver.start(f"3*{operation}:4099") as driven:
        driven.begin()
        driven.finish()
        found = copied(probes, driven.process)
        assert found == {(0, "to_peer"): (3, 3 * 4099), (1, "from_peer"): (3, 3 * 4099)}
        assert {key: size for key, (_, size) in found.items()} == peer_bytes_of(driver, driven.process)


def test_where_an_address_lies_inside_an_allocation_the_devices_are_not_known(
    driver: Driver, probes: LibcudaProbes
) -> None:
    driven = driver.run("peer_inside:4099")
    assert copied(probes, driven.process) == {(0, "device_to_device"): (1, 4099)}
