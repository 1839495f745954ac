# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Each change of a decision is one line; the loop is never held up; the disk is never filled."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforce.audit.decision_log import MOST_CONTAINERS, MOST_WAITING_LINES, DecisionLog, DecisionRecord, to_line
from tools.harness.wait import until

NS = 1_000_000_000
BASE = DecisionRecord(
    wall_ns=1_800_000_000 * NS,
    container="docker:abc",
    device="GPU-1",
    rule="training",
    law="headroom",
    latency_ns=40_000_000.0,
    samples=120,
    quantile=0.99,
    target_ns=50_000_000,
    slack_ratio=0.2,
    share_before=0.3,
    share_after=0.35,
    max_queued_ns=2_000_000,
    reason="slack 20%: one step up",
    acted=True,
)


def after(seconds: float, **changed: Any) -> DecisionRecord:
    return replace(BASE, wall_ns=BASE.wall_ns + int(seconds * NS), **changed)


def lines(path: Path, *decisions: DecisionRecord) -> list[dict[str, Any]]:
    log = DecisionLog(str(path))
    for decision in decisions:
        log.write(decision)
    log.close(within_seconds=60)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def test_a_decision_is_one_line_with_everything_in_it(path: Path) -> None:
    (line,) = lines(path, BASE)
    assert line == {
        "kind": "decision",
        "wall_ns": BASE.wall_ns, "container": "docker:abc", "device": "GPU-1", "rule": "training", "law": "headroom",
        "latency_ns": 40_000_000.0, "samples": 120, "quantile": 0.99, "target_ns": 50_000_000, "slack_ratio": 0.2,
        "share_before": 0.3, "share_after": 0.35, "max_queued_ns": 2_000_000, "reason": "slack 20%: one step up",
        "acted": True, "max_queued_before_ns": None, "name": "", "pod": None, "namespace": None, "ruler": "",
        "ruler_name": "", "rungs": [], "troubles": {}, "pauses": 0, "paused_seconds": 0.0, "other": None, "repeated": 0,
    }  # fmt: skip


def test_what_is_unknown_is_null(path: Path) -> None:
    (line,) = lines(path, replace(BASE, latency_ns=None, slack_ratio=None, share_before=None))
    assert line["latency_ns"] is line["slack_ratio"] is line["share_before"] is None


@pytest.mark.parametrize(
    "change",
    [{"share_after": 0.36}, {"max_queued_ns": 1_000_000}, {"reason": "target missed by 5%: half"}, {"law": "fixed"},
     {"rule": "sweep"}, {"acted": False}, {"target_ns": 1}, {"rungs": ("freeze",)},
     {"troubles": {"freeze": "no"}}],
)  # fmt: skip
def test_a_change_of_the_decision_is_a_line_at_once(path: Path, change: dict[str, Any]) -> None:
    assert len(lines(path, BASE, after(0.1, **change))) == 2


def test_other_figures_behind_the_same_decision_are_no_line_but_are_counted(path: Path) -> None:
    same = [after(n / 10, latency_ns=4e7 + n, samples=n, reason=f"slack {n}%: one step up") for n in range(1, 6)]
    found = lines(path, BASE, *same, after(0.7, share_after=0.5))
    assert [line["repeated"] for line in found] == [0, 5]


def test_a_slow_drift_is_logged_once_it_adds_up(path: Path) -> None:
    drift = [after(n / 10, share_after=0.35 + n * 0.001) for n in range(1, 11)]
    assert [line["repeated"] for line in lines(path, BASE, *drift)] == [0, 4, 4]


def test_an_unchanged_decision_is_logged_each_ten_seconds(path: Path) -> None:
    found = lines(path, BASE, *(after(n) for n in range(1, 31)))
    assert [(line["wall_ns"] - BASE.wall_ns) // NS for line in found] == [0, 10, 20, 30]
    assert [line["repeated"] for line in found] == [0, 9, 9, 9]


def test_a_clock_that_is_set_back_does_not_silence_the_log(path: Path) -> None:
    assert len(lines(path, BASE, after(-3600))) == 2


def test_each_container_on_each_device_has_its_own_last_line(path: Path) -> None:
    assert len(lines(path, BASE, after(0.1, container="docker:xyz"), after(0.2, device="GPU-2"), after(0.3))) == 3


def test_a_file_never_grows_beyond_its_bound_and_has_one_predecessor(path: Path) -> None:
    log = DecisionLog(str(path), most_bytes=2000)
    for number in range(200):
        log.write(after(number, share_after=(number % 2) / 2))
    log.close(within_seconds=60)
    assert sorted(os.listdir(path.parent)) == ["decisions.jsonl", "decisions.jsonl.1"]
    for name in os.listdir(path.parent):
        content = (path.parent / name).read_text()
        assert 0 < len(content) <= 2000
        assert all(json.loads(line) for line in content.splitlines())
    assert log.errors == log.dropped == 0


def test_a_file_that_another_program_moves_away_is_reopened(path: Path) -> None:
    from enforce.audit.decision_log import RotatedFile

    sink = RotatedFile(str(path), 1000)
    sink.write(b"one\n")
    path.rename(path.with_suffix(".old"))
    sink.write(b"two\n")
    path.unlink()
    sink.write(b"three\n")
    sink.close()
    assert path.read_bytes() == b"three\n"


@pytest.mark.parametrize("name", [".", "none/decisions", "link"])
def test_a_path_that_cannot_be_written_costs_lines_and_nothing_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    log = DecisionLog(str(tmp_path / name))
    log.write(BASE)
    log.close(within_seconds=60)
    assert log.errors == 1
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    log = DecisionLog("/dev/full")
    log.write(BASE)
    log.write(after(1, share_after=1.0))
    log.close(within_seconds=60)
    assert log.errors == 2


def test_a_reader_that_does_not_read_never_holds_up_the_loop(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it blocks the writing thread until it is read, which it is not
    log = DecisionLog(str(tmp_path / "pipe"))
    for number in range(MOST_WAITING_LINES + 100):
        log.write(after(0, container=f"c{number}"))
    assert 99 <= log.dropped <= 100  # the thread may already have taken one
    log.close(within_seconds=0.01)


def test_a_line_that_was_dropped_counts_as_not_logged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    log = DecisionLog(str(tmp_path / "pipe"))
    log.write(BASE)
    until(log._lines.empty, "the thread to wait for a reader")
    for number in range(MOST_WAITING_LINES + 10):
        log.write(after(0, container=f"c{number}"))
    dropped = log.dropped
    log.write(after(0.1, container=f"c{MOST_WAITING_LINES + 9}"))
    assert log.dropped == dropped + 1


def test_standard_output_takes_the_lines_too(capfd: pytest.CaptureFixture[str]) -> None:
    log = DecisionLog("-")
    log.write(BASE)
    log.close(within_seconds=60)
    assert json.loads(capfd.readouterr().out)["rule"] == "training"


def test_nowhere_takes_everything(capfd: pytest.CaptureFixture[str]) -> None:
    log = DecisionLog("")
    log.write(BASE)
    log.close(within_seconds=60)
    assert (capfd.readouterr().out, log.errors) == ("", 0)


def test_what_is_remembered_is_bounded_by_containers() -> None:
    log = DecisionLog("")
    for number in range(MOST_CONTAINERS + 50):
        log.write(after(0, container=f"c{number}"))
    log.close(within_seconds=60)
    assert len(log._last) <= MOST_CONTAINERS


@given(st.text(), st.text(), st.none() | st.floats(), st.floats())
def test_whatever_is_in_a_decision_is_one_line_of_strict_json(
    reason: str, container: str, latency_ns: float | None, share: float
) -> None:
    line = to_line(replace(BASE, reason=reason, container=container, latency_ns=latency_ns, share_after=share), 3)
    assert line.count(b"\n") == 1
    read = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert (read["reason"], read["container"], read["repeated"]) == (reason, container, 3)
