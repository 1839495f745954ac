# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The attribution bench, a short run of it: real agent, real NVML, and shares that add up to the device's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.attribution import __main__
from bench.attribution.agent import Agents
from bench.attribution.errors import leak, misses
from bench.attribution.run import Times, record
from bench.attribution.scenarios import Scenario, Tenant
from bench.attribution.shares import by_tenant, gpuwarden_seconds, true_seconds
from tools.harness import cgroups

STEADY = ("--kernels", "20", "--kernel-us", "400", "--host-us", "8000", "--seconds", "100000")
JOB = ("--kernels", "5", "--kernel-us", "500", "--iterations-per-us", "100", "--seconds", "0.3")


def test_the_rows_are_what_was_promised(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status = __main__.main(
        ["--scenarios", "time-sliced-2", "--seed", "3", "--warm-up", "2", "--seconds", "3", "--json", str(file)]
    )
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == ["gpuwarden", "nvml", "equal_split"]
    bounds = {"covered_ratio", "mean_bound_ratio", "unattributed_error"}
    for row in rows:
        assert set(row) - (bounds if row["method"] == "gpuwarden" else set()) == {
            "scenario",
            "method",
            "mean_abs_error",
            "worst_container_error",
            "seed",
            "containers",
            "seconds",
        }
        assert (row["scenario"], row["seed"], row["containers"]) == ("time-sliced-2", 3, 2)
        assert 0 < row["mean_abs_error"] <= row["worst_container_error"] <= 1
    assert all(0 <= rows[0][name] <= 1 for name in bounds)
    assert status == int(any(misses(row) for row in rows))


def test_shares_add_up_to_the_device_and_everything_is_gone_afterwards(tmp_path: Path) -> None:
    tenants = (Tenant("steady", "offline", STEADY), Tenant("jobs", "offline", JOB, jobs=True))
    with Agents(isolated=True) as agents:  # what else is tested on this machine is none of ours
        recording = record(Scenario("made-up", 1, 1, False, tenants), Times(2, 4), tmp_path / "run", agents)
    assert sum(life.name == "jobs" for life in recording.lives) > 1
    for seconds in (true_seconds, gpuwarden_seconds):
        shares = by_tenant(recording, seconds(recording))
        assert {owner.name for owner, share in shares.items() if share > 0} == {"steady", "jobs"}
    assert leak(recording) == pytest.approx(0, abs=1e-9)
    assert not cgroups.folders(f"/gpuwarden-bench-{os.getpid()}")


def test_clients_of_mps_have_their_shares_though_nvml_credits_the_server(tmp_path: Path) -> None:
    light = ("--kernels", "20", "--kernel-us", "400", "--host-us", "24000", "--seconds", "100000")
    tenants = (Tenant("heavy", "offline", STEADY), Tenant("light", "offline", light))
    with Agents(isolated=True) as agents:
        recording = record(Scenario("made-up", 1, 1, True, tenants), Times(3, 10), tmp_path / "run", agents)
    clients = {life.tgid for life in recording.lives}
    credited = {tgid for listing in recording.listings for _, tgid, ratio in listing.samples if ratio > 0}
    assert credited
    assert not credited & clients
    for seconds in (true_seconds, gpuwarden_seconds):
        shares = {owner.name: share for owner, share in by_tenant(recording, seconds(recording)).items()}
        assert shares["heavy"] > shares["light"] > 0
