# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a CUDA program sees of MIG instances and of several GPUs, and that instances do not disturb each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.harness.node import BUILD, Node, simulated_node

GIB = 1 << 30
LAYOUT = "1:3g.40gb,2g.20gb"
GPU = "GPU-5e1f{:04x}-51a1-4000-8000-{:012x}"
THREE, TWO = "MIG-5e1f0001-51a1-5000-8000-000100030028", "MIG-5e1f0001-51a1-5000-8000-000300020014"
# Prints what the driver API reports of each device, as one line of JSON.
LOOK = """
import ctypes, json, uuid
cuda = ctypes.CDLL("libcuda.so.1")
def uuid_by(call, device):
    raw = (ctypes.c_ubyte * 16)()
    assert cuda[call](raw, device) == 0
    return str(uuid.UUID(bytes=bytes(raw)))
status, count, seen = cuda.cuInit(0), ctypes.c_int(), []
assert status or cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
for device in range(count.value):
    name, sms, memory = ctypes.create_string_buffer(64), ctypes.c_int(), ctypes.c_size_t()
    assert cuda.cuDeviceGetName(name, 64, device) == 0
    assert cuda.cuDeviceGetAttribute(ctypes.byref(sms), 16, device) == 0
    assert cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
    seen.append({"name": name.value.decode(), "sms": sms.value, "memory": memory.value,
                 "uuid": uuid_by("cuDeviceGetUuid", device), "uuid_v2": uuid_by("cuDeviceGetUuid_v2", device)})
print(json.dumps({"status": status, "devices": seen}))
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with simulated_node(tmp_path / "gpu", {"gpus": "2", "mig": LAYOUT}) as node:
        yield node


def look(node: Node, **environment: str) -> Any:
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(
        command, env={**node.environment, **environment}, capture_output=True, text=True, timeout=30, check=True
    )
    return json.loads(done.stdout)


def seen(node: Node, **environment: str) -> list[str]:
    return [f"{device['uuid_v2']}" for device in look(node, **environment)["devices"]]


def gpu(index: int) -> str:
    return GPU.format(index, index + 1)


def test_an_instance_has_a_uuid_of_its_own_and_its_gpus(node: Node) -> None:
    (device,) = look(node, CUDA_VISIBLE_DEVICES=TWO)["devices"]
    assert (device["uuid"], device["uuid_v2"]) == (gpu(1)[4:], TWO[4:])
    assert (device["sms"], device["memory"]) == (32, 20 * GIB)
    assert device["name"].endswith(" MIG 2g.20gb")


def test_a_program_sees_one_instance_at_most_and_no_gpu_beside_it(node: Node) -> None:
    assert seen(node) == [THREE[4:]]
    assert seen(node, CUDA_VISIBLE_DEVICES="0,1") == [THREE[4:]]
    assert seen(node, CUDA_VISIBLE_DEVICES=f"{TWO},{THREE}") == [TWO[4:]]
    assert seen(node, CUDA_VISIBLE_DEVICES=f"{gpu(0)},{TWO}") == [TWO[4:]]
    assert seen(node, CUDA_VISIBLE_DEVICES="0") == [gpu(0)[4:]]


def test_an_instance_is_named_in_each_of_the_drivers_ways(node: Node) -> None:
    assert seen(node, CUDA_VISIBLE_DEVICES="1") == [THREE[4:]]
    assert seen(node, CUDA_VISIBLE_DEVICES=gpu(1)) == [THREE[4:]]
    assert seen(node, CUDA_VISIBLE_DEVICES=f"MIG-{gpu(1)}/3/0") == [TWO[4:]]


@pytest.mark.parametrize("name", [TWO[:-1], "MIG-", f"MIG-{gpu(1)}/9/0", "MIG-GPU-0/1/0", "2"])
def test_a_name_that_means_no_instance_shows_nothing(node: Node, name: str) -> None:
    assert look(node, CUDA_VISIBLE_DEVICES=name) == {"status": 100, "devices": []}


def test_a_gpu_in_mig_mode_without_instances_is_not_there(node: Node) -> None:
    node.fault("mig", "1", "")
    assert seen(node) == [gpu(0)[4:]]


def test_numbers_count_the_fastest_gpu_first_unless_ordered_by_the_bus(tmp_path: Path) -> None:
    with simulated_node(tmp_path / "gpu", {"gpus": "3", "sms": "66,132,132"}) as node:
        by_speed, by_bus = [gpu(1)[4:], gpu(2)[4:], gpu(0)[4:]], [gpu(0)[4:], gpu(1)[4:], gpu(2)[4:]]
        assert seen(node) == by_speed
        assert seen(node, CUDA_DEVICE_ORDER="FASTEST_FIRST") == by_speed
        assert seen(node, CUDA_DEVICE_ORDER="PCI_BUS_ID") == by_bus
        assert seen(node, CUDA_VISIBLE_DEVICES="0") == by_speed[:1]
        assert seen(node, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == by_bus[:1]
        assert seen(node, CUDA_VISIBLE_DEVICES=gpu(2)) == [gpu(2)[4:]]


def test_work_on_one_instance_does_not_delay_that_on_another(node: Node) -> None:
    """Both ask for every SM all the time: on one GPU each would get half of it, as would two on one instance."""
    work = ["--seconds", "2", "--kernels", "20", "--kernel-us", "500", "--blocks", "1000", "--host-us", "0"]
    begun_ns = node.status()[0]["at_ns"]
    running = [node.start("offline", work, {"CUDA_VISIBLE_DEVICES": uuid}) for uuid in (THREE, TWO)]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    first, second = node.truth()
    assert {first["device"], second["device"]} == {2, 3}
    assert [entry["sm_ns"] > 0.75 * entry["busy_ns"] for entry in (first, second)] == [True, True]
    elapsed_ns = node.status()[0]["at_ns"] - begun_ns
    assert first["busy_ns"] + second["busy_ns"] > elapsed_ns, "they never ran at the same time"
    by_index = {entry["device"]: entry for entry in node.status()}
    for entry in (first, second):
        assert by_index[entry["device"]]["sm_active_ns"] == entry["sm_ns"]
        assert by_index[entry["device"]]["gpu"] == 1


def test_a_program_that_came_before_its_instance_went_gets_an_error(node: Node) -> None:
    script = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
print("ready", flush=True)
sys.stdin.readline()
print(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
"""
    command = [sys.executable, "-c", script]
    pipe, environment = subprocess.PIPE, {**node.environment, "CUDA_VISIBLE_DEVICES": THREE}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as program:
        assert program.stdout
        assert program.stdout.readline() == "ready\n"
        node.fault("mig", "1", "off")
        answer, _ = program.communicate("go\n", timeout=30)
    assert answer == "100\n", "CUDA_ERROR_NO_DEVICE"


def test_mps_clients_of_an_instance_share_that_instance(node: Node) -> None:
    work = ["--seconds", "1", "--kernels", "20", "--kernel-us", "500", "--blocks", "1000", "--host-us", "0"]
    with node.mps_daemon():
        limits = {"CUDA_VISIBLE_DEVICES": TWO, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
        running = [node.start("offline", work, limits) for _ in range(2)]
        for process in running:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    for entry in node.truth():
        assert (entry["device"], entry["mps"]) == (3, True)
        assert 0.2 < entry["sm_ns"] / entry["busy_ns"] <= 0.2501, "8 of 32 SMs, whatever the other one does"


def test_the_memory_of_an_instance_is_its_own(node: Node) -> None:
    steps = ["--steps", "1", "--memory", "30GiB"]
    assert node.run("offline", steps, extra={"CUDA_VISIBLE_DEVICES": THREE}).returncode == 0
    refused = node.run("offline", steps, extra={"CUDA_VISIBLE_DEVICES": TWO})
    assert (refused.returncode != 0, "OUT_OF_MEMORY" in refused.stderr) == (True, True)


@pytest.mark.parametrize(
    "mig", ["0:4g.40gb,4g.40gb", "0:5g.10gb", "2:1g.10gb", "0:7g.81gb", "3g.40gb", "0:3g.40gb,", "0:1g", "0:3g.40gb x"]
)
def test_a_layout_that_no_gpu_has_is_refused(tmp_path: Path, mig: str) -> None:
    (tmp_path / "conf").write_text(f"gpus = 2\nmig = {mig}\n")
    command = [str(BUILD / "bin/gpusim"), "serve", "--dir", str(tmp_path), "--config", str(tmp_path / "conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "mig" in done.stderr.lower()


def test_a_layout_that_comes_back_is_the_same_instances_again(node: Node) -> None:
    before = node.status()
    for _ in range(40):
        node.fault("mig", "1", "7g.80gb")
        node.fault("mig", "1", "3g.40gb,2g.20gb")
    assert [entry["uuid"] for entry in node.status()] == [entry["uuid"] for entry in before]
    assert [entry["device"] for entry in node.status()] == [entry["device"] for entry in before]
