# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The item `attribution`: the truth from what programs say of themselves, and rows out of it."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    Provenance,
    Snapshot,
    Totals,
    Usage,
)
from bench.attribution.nvml import Listing
from bench.attribution.recording import Life, Recording
from conformance import checks
from conformance.checks.attribution import item, rows
from conformance.checks.attribution.pytorch import PyTorch, compared, source
from conformance.checks.attribution.recorder import Snapshots
from conformance.checks.attribution.scene import SceneResult, on_a_grid, usage_of
from conformance.checks.attribution.stage import Cgroups
from conformance.checks.attribution.tenants import Tenant, TenantWork, did, request_ends
from conformance.clients.workload import Pace, Workload
from conformance.host import Unavailable
from conformance.report.model import Row, Verdict

SECOND = 10**9
GPU = DeviceUuid("GPU-0")
DEVICE = Device(0, GPU, "H", "", 132, None)
PACE = Pace(20, 1.1)
STEADY = Tenant("steady", "offline", 20, 500, 0.5, 0.3, memory_bytes=1000, copy_bytes=24)
CALLER = Tenant("caller", "online", 10, 200, 1.0, 0.1, copy_bytes=8)


def a_workload(*progress: tuple[int, int]) -> Workload:
    with subprocess.Popen(["true"], text=True) as process:
        return Workload(process, Path("steady.json"), list(progress))


def by_what(found: Sequence[Row]) -> dict[str, Row]:
    made = {row.what: row for row in found}
    assert len(made) == len(found), "`what` is unique"
    assert not [what for what in made if not any(checks.lists(pattern, what) for pattern in item.WHAT)]
    return made


def test_what_a_training_did_is_kernels_times_their_length_and_part_of_the_sms(tmp_path: Path) -> None:
    summary = {"started_monotonic_ns": 5 * SECOND, "elapsed_seconds": 4.0, "kernels": 2000, "copied_bytes": 2400}
    done = did(STEADY, a_workload((6 * SECOND, 500), (8 * SECOND, 1500)), summary, PACE, tmp_path)
    kernel_ns = 500e3 * 1.1 / 2
    assert done.kernels == 2000
    assert (done.to_device_bytes, done.from_device_bytes) == (2400, 0)
    points = ((5, 0), (6, 500), (8, 1500), (9, 2000))
    assert [at for at, _ in done.sm] == [at * SECOND for at, _ in points]
    for (_, sm_ns), (_, kernels) in zip(done.sm, points, strict=True):
        assert sm_ns == pytest.approx(kernels * kernel_ns)


def test_what_a_service_did_is_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "caller.log").write_text("0.100000000 0.002 0.002\n0.500000000 0.250 0.002\n0.6000")
    summary = {"started_monotonic_ns": 5 * SECOND, "elapsed_seconds": 1.0, "requests": 2}
    done = did(CALLER, a_workload(), summary, PACE, tmp_path)
    assert done.kernels == 20
    assert done.from_device_bytes == 16
    assert [at for at, _ in done.sm] == [5 * SECOND, 5_102_000_000, 5_750_000_000, 6 * SECOND]
    assert done.sm[-1][1] == pytest.approx(20 * 200e3 * 1.1)


def test_requests_end_in_another_order_than_they_came() -> None:
    assert request_ends("0.1 0.9 0\n0.2 0.1 0\n", 0) == [300_000_000, SECOND]


def test_series_are_put_on_the_same_times() -> None:
    samples = on_a_grid({1: [(0, 0.0), (2 * SECOND, 200.0)], 2: []}, SECOND, 2 * SECOND, GPU)
    assert samples[0].at_ns == SECOND
    assert samples[0].sm_ns == {(1, GPU): 100, (2, GPU): 0}
    assert samples[-1].sm_ns == {(1, GPU): 200, (2, GPU): 0}


def usage(sm_seconds: float = 0.0, launches: int = 0, rx: int = 0, tx: int = 0, memory: int | None = None) -> Usage:
    totals = Totals(sm_seconds, launches, tx, rx)
    kinds = {"plain": 1000, "pinned": 77}
    return Usage(GPU, 0.5, None, memory, None, None, None, totals, memory_by_kind=kinds)


def snapshot(at: float, **of: Usage) -> Snapshot:
    containers = [
        ContainerUsage(Container(ContainerKey(name), name, "docker", id=name), (one,), ()) for name, one in of.items()
    ]
    devices = (DeviceReading(DEVICE, sm_activity_ratio=0.6),)
    return Snapshot(round(at * SECOND), round(at * SECOND), SECOND, devices, tuple(containers))


def a_played(agents: Mapping[str, float], **other: object) -> SceneResult:
    """Two tenants for ten seconds: truly steady has 0.3 of the device and caller 0.2; `agents`: what it reports."""
    lives = [Life("steady", "s", 1, 0), Life("caller", "c", 2, 0)]
    snapshots = [
        snapshot(at, s=usage(agents["steady"] * at, memory=1500), c=usage(agents["caller"] * at, memory=300))
        for at in range(1, 12)
    ]
    listings = [Listing(at * SECOND, GPU, (1, 2), ((at * 10**6, 1, 0.6), (at * 10**6, 2, 0.2))) for at in range(1, 12)]
    grown = {1: [(0, 0.0), (20 * SECOND, 6.0 * SECOND)], 2: [(0, 0.0), (20 * SECOND, 4.0 * SECOND)]}
    truth = on_a_grid(grown, SECOND, 11 * SECOND, GPU)
    recording = Recording(lives, snapshots, truth, listings, SECOND, 11 * SECOND)
    done = {"steady": TenantWork(2000, 2400, 0, []), "caller": TenantWork(20, 0, 16, [])}
    return replace(
        SceneResult("three", [STEADY, CALLER], done, recording, usage_of(recording), 12 * SECOND),
        **other,  # type: ignore[arg-type]
    )


def test_shares_that_are_right_are_ok_and_nvml_alone_is_only_measured() -> None:
    found = by_what(list(rows.of_shares(a_played({"steady": 0.31, "caller": 0.2}), None, None)))
    mean = found["three: mean error of a container's share, agent"]
    assert (mean.verdict, mean.figure) == (Verdict.OK, 0.005)
    assert found["three: worst error of a container's share, agent"].figure == 0.01
    nvml = found["three: worst error of a container's share, NVML alone"]
    assert (nvml.verdict, nvml.figure) == (Verdict.MEASURED, 0.3)
    assert found["three: worst error of a container's share, equal split"].figure == 0.1
    share = found["three: share of steady, agent"]
    assert (share.figure, share.baseline) == (0.31, 0.3)


def test_shares_that_are_wrong_differ() -> None:
    found = by_what(list(rows.of_shares(a_played({"steady": 0.2, "caller": 0.2}), None, None)))
    assert found["three: mean error of a container's share, agent"].verdict == Verdict.DIFFERS
    assert found["three: worst error of a container's share, agent"].figure == 0.1


def test_without_the_agent_nvml_alone_is_still_judged() -> None:
    found = by_what(list(rows.of_shares(a_played({"steady": 0.3, "caller": 0.2}), None, "no BPF here")))
    assert found["three: mean error of a container's share, agent"].note == "no BPF here"
    assert found["three: mean error of a container's share, agent"].verdict == Verdict.SKIPPED
    assert found["three: mean error of a container's share, NVML alone"].verdict == Verdict.MEASURED
    none = by_what(list(rows.of_shares(a_played({"steady": 0.3, "caller": 0.2}), "Not Supported", None)))
    assert none["three: mean error of a container's share, NVML alone"].note == "Not Supported"


def test_memory_against_what_was_allocated() -> None:
    one = a_played({"steady": 0.3, "caller": 0.2})
    found = by_what(list(rows.of_memory(one)))
    assert found["three: bytes of steady by NVML beyond what it allocated"].figure == 1500 - 1024
    probes = found["three: bytes of steady by the probes beyond what it allocated"]
    assert (probes.verdict, probes.figure) == (Verdict.DIFFERS, 1000 - 1024)
    exact = by_what(list(rows.of_memory(replace(one, tenants=[replace(STEADY, memory_bytes=976)]))))
    assert exact["three: bytes of steady by the probes beyond what it allocated"].verdict == Verdict.OK


def test_launches_and_bytes_against_the_programs_own_count() -> None:
    one = a_played({"steady": 0.3, "caller": 0.2})
    reported = {"steady": usage(1.0, launches=1990, rx=2400), "caller": usage(1.0, launches=20, tx=8)}
    found = by_what(list(rows.of_totals(one, reported)))
    missed = found["three: launches of steady that the agent missed"]
    assert (missed.verdict, missed.figure) == (Verdict.DIFFERS, 10)
    assert found["three: launches of caller that the agent missed"].verdict == Verdict.OK
    assert found["three: bytes that steady copied to the device, agent ÷ own"].verdict == Verdict.OK
    assert found["three: bytes that caller copied from the device, agent ÷ own"].figure == 0.5


def test_a_container_that_the_agent_does_not_know_is_reported() -> None:
    found = by_what(list(rows.of_totals(a_played({"steady": 0.3, "caller": 0.2}), {})))
    assert {row.verdict for row in found.values()} == {Verdict.SKIPPED}


def test_our_reckoning_is_held_against_the_simulated_gpus_truth() -> None:
    mine = a_played({"steady": 0.3, "caller": 0.2})
    other = {1: [(0, 0.0), (20 * SECOND, 7.0 * SECOND)], 2: [(0, 0.0), (20 * SECOND, 4.0 * SECOND)]}
    theirs = replace(mine, recording=replace(mine.recording, truth=on_a_grid(other, SECOND, 11 * SECOND, GPU)))
    assert rows.of_reckoning(mine, mine).verdict == Verdict.OK
    row = rows.of_reckoning(mine, theirs)
    assert (row.verdict, row.figure) == (Verdict.DIFFERS, 0.05)


REPORTED = {
    "sm_seconds": 0.8,
    "busy_seconds": 0.9,
    "kernels": 500,
    "to_device_bytes": 4096,
    "from_device_bytes": 0,
    "reserved_bytes": 1000,
}


def test_pytorch_alone_against_cupti() -> None:
    before, after = usage(10.0, 100, 1 << 20), usage(10.82, 600, (1 << 20) + 4096, memory=1400)
    found = by_what(list(compared(before, after, REPORTED, 2.0, "estimated")))
    assert found["PyTorch alone: share of the device, agent"].figure == 0.41
    assert found["PyTorch alone: share of the device, agent"].baseline == 0.4
    assert found["PyTorch alone: share of the device, agent"].note == "against CUPTI's; estimated"
    assert found["PyTorch alone: kernels that the agent missed"].verdict == Verdict.OK
    assert found["PyTorch alone: bytes copied to the device, agent ÷ CUPTI"].verdict == Verdict.OK
    assert found["PyTorch alone: bytes by NVML beyond what its allocator holds"].figure == 400
    assert found["PyTorch alone: bytes by the probes ÷ what its allocator holds"].verdict == Verdict.OK


def test_where_the_agent_has_a_share_from_is_named() -> None:
    device = DeviceReading(DEVICE, sm_activity_ratio=0.6, sm_activity_source="gpm")
    alone = replace(usage(), sm_provenance=Provenance.MEASURED)
    meanwhile = replace(snapshot(1, torch=alone, other=usage()), devices=(device,))
    assert source(meanwhile, "torch") == "measured, the device's by gpm"
    assert source(replace(meanwhile, devices=()), "other") == "not known, the device's by nothing"
    assert source(meanwhile, "gone") == "from what is not known"


def test_kernels_that_no_probe_saw_are_missed() -> None:
    found = by_what(list(compared(usage(1.0, 100), usage(1.8, 550), REPORTED, 2.0, "")))
    missed = found["PyTorch alone: kernels that the agent missed"]
    assert (missed.verdict, missed.figure) == (Verdict.DIFFERS, 50)
    assert found["PyTorch alone: bytes by NVML beyond what its allocator holds"].verdict == Verdict.SKIPPED


def talking(text: str) -> PyTorch:
    with subprocess.Popen(["true"], text=True) as process:
        pass
    process.stdout = io.StringIO(text)
    found = PyTorch(process)
    found.listen()
    return found


def test_what_pytorch_prints_is_waited_for() -> None:
    found = talking('a warning\n{"event": "progress", "steps": 1}\n{"event": "ran", "steps": 2}\n')
    ran, before = found.until("ran", 1.0)
    assert ran["steps"] == 2
    assert [one["steps"] for one in before] == [1]
    with pytest.raises(RuntimeError, match="ended"):
        found.until("profiled", 1.0)


def test_pytorch_without_a_gpu_is_skipped_and_not_broken() -> None:
    with pytest.raises(Unavailable, match="finds none"):
        talking('{"event": "no GPU"}\n').until("opened", 1.0, "PyTorch finds none")


def test_pytorch_that_prints_nothing_is_not_waited_for_for_ever() -> None:
    with pytest.raises(RuntimeError, match="no opened"):
        PyTorch(None).until("opened", 0.01)


def test_a_snapshot_after_a_time_is_the_first_one() -> None:
    found = Snapshots(None, [snapshot(1), snapshot(2), snapshot(3)])
    assert found.after(round(1.5 * SECOND)).at_ns == 2 * SECOND
    found.error = "the agent went away"
    with pytest.raises(RuntimeError, match="went away"):
        found.after(9 * SECOND)


def test_without_an_agent_the_clocks_are_still_compared() -> None:
    found = Snapshots(None)
    found._look()
    assert abs(found.taken[0].wall_ns - time.time_ns()) < 60 * SECOND
    assert found.taken[0].containers == ()


def test_containers_look_like_dockers(tmp_path: Path) -> None:
    place = tmp_path / "docker"
    name, before = Cgroups(place).container()
    assert len(name) == 64
    assert (place / name).is_dir()
    assert before[-1] == str(place / name)
    assert Cgroups(place).container()[0] != name
