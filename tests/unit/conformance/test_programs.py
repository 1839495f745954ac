# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The parts of the PyTorch programs that need no PyTorch."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from conformance.checks.enforcement.item import SECONDS
from conformance.checks.enforcement.pairs import ALL
from conformance.programs import offline_torch, online_torch


def test_quantiles_are_those_of_requests_that_there_were() -> None:
    found = online_torch.summary([0.004, 0.001, 0.003, 0.002])
    assert found == {
        "p50": 0.002,
        "p90": 0.004,
        "p99": 0.004,
        "p999": 0.004,
        "max": 0.004,
        "mean": pytest.approx(0.0025),
    }


def test_a_round_without_requests_has_no_quantiles(tmp_path: Path) -> None:
    played = online_torch.play(lambda: None, [], tmp_path / "log")
    assert (played["requests"], played["latency_seconds"], played["busy_ratio"]) == (0, None, 0.0)


def test_a_latency_counts_from_when_the_request_was_to_arrive(tmp_path: Path) -> None:
    clock = [0.0]

    def serve() -> None:
        clock[0] += 1

    played = online_torch.play(serve, [-0.5, -0.25], tmp_path / "log")
    arrivals, latencies, services = zip(
        *(map(float, line.split()) for line in (tmp_path / "log").read_text().splitlines()), strict=True
    )
    assert clock == [2.0]
    assert arrivals == (-0.5, -0.25)
    assert latencies[0] >= 0.5
    assert latencies[1] >= 0.25
    assert all(service < 0.25 for service in services)
    assert played["latency_seconds"]["max"] == pytest.approx(latencies[0], abs=1e-8)


def test_arrivals_come_from_a_file_or_repeat_with_the_seed(tmp_path: Path) -> None:
    drawn = argparse.Namespace(trace=None, rate=100.0, seconds=1.0, seed=3)
    other = argparse.Namespace(trace=None, rate=100.0, seconds=1.0, seed=4)
    assert online_torch.arrivals(drawn) == online_torch.arrivals(drawn) != online_torch.arrivals(other)
    (tmp_path / "trace").write_text("0.5\n0.75\n")
    assert online_torch.arrivals(argparse.Namespace(trace=tmp_path / "trace")) == [0.5, 0.75]


@pytest.mark.parametrize(
    ("took_s", "size"), [(0.007, 8192), (0.000875, 16384), (0.056, 4096), (1e-9, 32768), (100.0, 256)]
)
def test_a_product_is_sized_by_the_third_root(took_s: float, size: int) -> None:
    assert offline_torch.fitting(8192, took_s, 0.007) == size


def test_a_program_that_works_stops_at_a_step_on_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bytes_to_come = [offline_torch.NOTHING, offline_torch.NOTHING, b"p"]
    monkeypatch.setattr(offline_torch, "asked", lambda: bytes_to_come.pop(0))
    steps: list[int] = []
    with (tmp_path / "log").open("w") as log:
        assert offline_torch.work(lambda: steps.append(1), log, 7) == (9, b"p")
    assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()] == ["8", "9"]


def test_the_first_two_pairs_fit_into_the_item_and_all_have_names_of_their_own() -> None:
    assert len({pair.name for pair in ALL}) == len(ALL)
    assert sum(pair.seconds for pair in ALL[:2]) <= SECONDS
