# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What gputop draws, at every width, with names that try to do harm."""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from agent import observer
from agent.core.errors import SetupError, UsageError
from agent.core.model import ContainerUsage, EnforcementStatus, Provenance, Snapshot
from agent.core.snapshot_json import loads
from agent.core.text import ASCII, UTF8, count, percent, size
from agent.tui import View, plain, render
from agent.tui.cells import GPU_THRESHOLDS, bar, colour
from agent.tui.columns import Column, fit
from agent.tui.live import run as live
from agent.tui.plain import Stopped, fresh
from agent.tui.recording import EndOfRecording, opened, played, recorded
from gpuwarden import main, top
from gpuwarden.top import add_arguments
from tests.support.snapshots import GPU_0, container, rich_snapshot, usage

WIDTHS = (80, 81, 95, 96, 97, 120, 129, 130, 160, 200)


def drawn(snapshot: Snapshot, view: View = View.CONTAINER, width: int = 160, *, alone: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as capture:
        console.print(render(snapshot, view, alone=alone))
    return capture.get().splitlines()


def row(lines: list[str], name: str) -> str:
    (line,) = (line for line in lines if line.lstrip().startswith(name))
    return line


@pytest.mark.parametrize("view", list(View))
@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(width: int, view: View) -> None:
    lines = drawn(rich_snapshot(), view, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == len(drawn(rich_snapshot(), view, 200)), "something wrapped"


@pytest.mark.parametrize("view", list(View))
@pytest.mark.parametrize("width", WIDTHS)
def test_names_are_shown_and_never_obeyed(width: int, view: View) -> None:
    text = "".join(drawn(rich_snapshot(), view, width))
    assert text.isprintable()
    assert r"\x1b[31mevil" in text


def test_markup_in_a_name_is_text() -> None:
    assert "[/][bold]" in "".join(drawn(rich_snapshot(), width=200))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_container_row_has_at_least_name_device_sm_and_memory(width: int) -> None:
    cells = row(drawn(rich_snapshot(), width=width), "trainer").split()
    assert {"trainer", "0", "~48.0", "50.0Gi"} <= set(cells)


def test_eighty_columns_have_room_for_what_enforcement_does() -> None:
    lines = drawn(rich_snapshot(), width=80)
    assert row(lines, "chat").split() == [
        "chat",
        "online",
        "0",
        "~31.0",
        "40.0Gi",
        "12.3/50ms",
        "+75%",
        "–",
        "–",
    ]
    assert row(lines, "trainer").split()[-3:] == ["62.0%", "paused", "35%"]


def test_a_wide_terminal_shows_the_reason_and_the_pod() -> None:
    line = row(drawn(rich_snapshot(), width=200), "trainer")
    assert "containerd/batch/train-0" in line
    assert "paused 35%" in line
    assert "slack 75 %: growing by 2 % of the device" in line


def test_where_a_container_works_without_launches_that_are_seen_there_is_the_word_for_it() -> None:
    unseen, seen = sorted(line for line in drawn(rich_snapshot()) if line.lstrip().startswith("twin"))
    if "unseen" in seen:
        unseen, seen = seen, unseen
    assert " unseen " in unseen
    assert "unseen" not in seen


def test_measured_figures_have_no_tilde_and_unknown_ones_are_dashes() -> None:
    lines = drawn(rich_snapshot(), width=200)
    assert sum(" 1.0 " in line for line in lines if line.startswith("twin")) == 1
    assert row(lines, "host").split() == ["host", "host", "–", "1", "–", "–", "–", "–", "–"]


def test_without_enforcement_its_columns_are_gone() -> None:
    lines = drawn(replace(rich_snapshot(), enforcement={}, enforcing=False), width=80)
    assert "CLASS" not in "".join(lines)
    assert "RUNTIME/POD" in "".join(lines)


def test_a_missed_target_is_red_and_a_kept_one_green() -> None:
    def styled(latency: float) -> str:
        console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard")
        key = container("c1", "chat").key
        slack = 1 - latency / 0.05
        statuses = {key: EnforcementStatus("online", "chat", latency, 0.99, 0.05, slack_ratio=slack)}
        with console.capture() as capture:
            console.print(render(replace(rich_snapshot(), enforcement=statuses)))
        return capture.get()

    assert "\x1b[31m60/50ms" in styled(0.06).replace(" ", "")
    assert "\x1b[31m-20%" in styled(0.06).replace(" ", "")
    assert "\x1b[32m40/50ms" in styled(0.04).replace(" ", "")


def test_the_quantile_heads_the_latencies_only_where_they_have_one_in_common() -> None:
    snapshot = rich_snapshot()
    assert "p99/TARGET" in "".join(drawn(snapshot))
    keys = list(snapshot.enforcement)
    mixed = {
        keys[0]: EnforcementStatus("online", latency_quantile=0.5),
        keys[1]: EnforcementStatus("online", latency_quantile=0.999),
    }
    assert "LAT/TARGET" in "".join(drawn(replace(snapshot, enforcement=mixed)))
    tail = {keys[0]: EnforcementStatus("online", latency_quantile=0.999)}
    assert "p99.9/TARGET" in "".join(drawn(replace(snapshot, enforcement=tail)))


def test_the_footer_tells_of_losses_failures_and_xids() -> None:
    text = "\n".join(drawn(rich_snapshot()))
    assert "GPU 0: XID 31 (2x), XID 79 (1x)" in text
    assert "lost events: launches:full 12" in text
    assert "collector launches: map read failed: E2BIG" in text
    assert "probes: 1 of 42 failed" in text


def test_an_empty_snapshot_shows_what_is_absent() -> None:
    empty = Snapshot(0, 0, 0)
    assert "no container uses a GPU" in "".join(drawn(empty))
    assert "no GPU found" in "".join(drawn(empty, View.GPU))
    assert "observing only" in drawn(empty)[0]


def test_without_utf8_everything_is_ascii() -> None:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding="ascii")
    strange = ContainerUsage(container("c9", "straße-漢"), (usage(GPU_0, 0.5, 1),), ())
    snapshot = replace(rich_snapshot(), containers=(*rich_snapshot().containers, strange))
    for width in WIDTHS:
        Console(file=file, width=width).print(render(snapshot))
    file.flush()
    assert b"stra\\xdfe" in written.getvalue()


def test_processes_are_listed_with_their_container() -> None:
    line = row(drawn(rich_snapshot(), View.PROCESS), "200")
    assert line.split()[:5] == ["200", "root", "python", "train.py", "trainer"]


def test_each_gpu_heads_its_containers_and_ends_with_what_is_unattributed() -> None:
    lines = drawn(rich_snapshot(), View.GPU, 140)
    first, second = (next(i for i, line in enumerate(lines) if line.startswith(f"GPU {n} NVIDIA")) for n in (0, 1))
    assert any(line.startswith("├─ trainer") for line in lines[first:second])
    assert lines[second - 1].startswith("└─ (unattributed)")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent(None, UTF8), "–"),
        (percent(0.0, UTF8), "0.0"),
        (percent(0.4567, UTF8, Provenance.ESTIMATED), "~45.7"),
        (percent(1.0, UTF8), "100"),
        (size(None, UTF8), "–"),
        (size(0, UTF8), "0"),
        (size(999, UTF8), "999"),
        (size(1023, UTF8), "1Ki"),
        (size(1 << 20, UTF8), "1.0Mi"),
        (size(150 << 20, UTF8), "150Mi"),
        (size(1000 << 20, UTF8), "1.0Gi"),
        (size(5 << 40, UTF8), "5.0Ti"),
        (count(None, ASCII), "-"),
        (count(999.4, UTF8), "999"),
        (count(12_345, UTF8), "12.3k"),
        (count(2e9, UTF8), "2.0G"),
    ],
)
def test_figures_are_short(shown: str, expected: str) -> None:
    assert shown == expected


def test_bars_and_colours_follow_nvitops_thresholds() -> None:
    assert [colour(ratio, GPU_THRESHOLDS) for ratio in (None, 0.05, 0.10, 0.74, 0.75)] == [
        "",
        "green",
        "yellow",
        "yellow",
        "red",
    ]
    assert bar(0.5, 10, GPU_THRESHOLDS, ASCII).plain == "#####....."
    assert bar(None, 4, GPU_THRESHOLDS, ASCII).plain == "...."
    assert bar(7.0, 4, GPU_THRESHOLDS, ASCII).plain == "####"


def test_the_least_important_columns_go_first() -> None:
    columns = [Column("a", "A", 5), Column("b", "B", 5, 2), Column("c", "C", 5, 1, 9)]
    assert [column.key for column in fit(columns, 12)] == ["a", "c"]
    assert [(column.key, column.width) for column in fit(columns, 20)] == [("a", 5), ("b", 5), ("c", 8)]


class Latest:
    """Snapshots as an agent publishes them, and a clock that moves when it is waited for."""

    def __init__(self, *snapshots: Snapshot | None) -> None:
        self.snapshots = list(snapshots)
        self.at = 0.0

    def __call__(self) -> Snapshot | None:
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def wait(self, seconds: float) -> None:
        self.at += seconds

    def source(self) -> Callable[[], Snapshot]:
        return fresh(self, 1.0, now=lambda: self.at, wait=self.wait)


def at(ns: int, interval_ns: int = 1) -> Snapshot:
    return Snapshot(ns, ns, interval_ns)


def test_each_snapshot_is_shown_once_and_none_without_rates() -> None:
    source = Latest(None, at(1, 0), at(2), at(2), at(2), at(3), at(4)).source()
    assert [source().at_ns, source().at_ns, source().at_ns] == [2, 3, 4]


def test_an_agent_that_is_stuck_is_shown_again_and_one_that_is_gone_is_an_error() -> None:
    source = Latest(at(1)).source()
    assert [source().at_ns, source().at_ns] == [1, 1]
    gone = Latest(at(1), None).source()
    gone()
    with pytest.raises(SetupError, match="start gputop again"):
        gone()


def test_a_recording_plays_back_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    snapshots = iter([rich_snapshot(), at(7)])
    with recorded(lambda: next(snapshots), file) as source:
        assert [source(), source()] == [rich_snapshot(), at(7)]
    with opened(file) as recording:
        source = played(recording)
        assert [source(), source()] == [rich_snapshot(), at(7)]
        with pytest.raises(EndOfRecording):
            source()
        assert (len(recording), recording[1], recording[0]) == (2, at(7), rich_snapshot())


def test_a_recording_that_cannot_even_begin_is_an_error() -> None:
    with recorded(rich_snapshot, Path("/dev/full")) as source, pytest.raises(SetupError, match="cannot record to"):
        source()


def test_a_full_disk_ends_the_recording_after_a_whole_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gpu.jsonl"
    snapshots = iter(replace(rich_snapshot(), at_ns=ns) for ns in (1, 2, 3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with recorded(lambda: next(snapshots), file) as source:
        source()
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, limits[1]))
        try:
            assert [source().at_ns, source().at_ns] == [2, 3]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.getMessage() for record in caplog.records] == [f"recording to {file} has ended (File too large)"]
    with opened(file) as recording:
        assert (len(recording), recording[0].at_ns) == (1, 1)


def test_what_cannot_be_sought_is_to_be_unpacked(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"{}\n")
    os.close(write)
    with pytest.raises(SetupError, match="unpack it to a file first"), opened(Path(f"/dev/fd/{read}")):
        pass
    os.close(read)


def test_a_broken_recording_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    file.write_text("\n\n{}\n")
    with opened(file) as recording, pytest.raises(SetupError, match=r"gpu\.jsonl, line 3"):
        played(recording)()


def test_an_empty_recording_is_reported_as_one(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    file.write_text("\n")
    with pytest.raises(SetupError, match="holds no snapshot"), opened(file):
        pass


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot replay"), opened(tmp_path / "none"):
        pass
    with pytest.raises(SetupError, match="cannot record"), recorded(rich_snapshot, tmp_path):
        pass


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_once_prints_one_table_and_json_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run(options("--once"), rich_snapshot) == 0
    assert capsys.readouterr().out.count("GPU Warden") == 1
    assert top.run(options("--once", "--json"), rich_snapshot) == 0
    out = capsys.readouterr().out
    assert loads(out) == rich_snapshot()
    assert json.loads(out)["version"] == 1


def test_a_replay_ends_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.jsonl"
    ticks = iter([rich_snapshot(), at(7)])
    with recorded(lambda: next(ticks), file) as source:
        source(), source()
    assert top.replay(options("--replay", str(file), "--interval", "0.1", "--by-gpu")) == 0
    assert capsys.readouterr().out.count("GPU Warden") == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--interval", "0"),
        ("--interval", "soon"),
        ("--interval", "nan"),
        ("--interval", "3601"),
        ("--by-gpu", "--by-process"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options(*words)
    assert caught.value.code == 2


def test_a_replay_is_not_recorded() -> None:
    with pytest.raises(UsageError, match="--record and --replay"):
        top.replay(options("--replay", "a", "--record", "b"))


def test_a_replay_of_a_gpu_that_is_not_there_does_not_take_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_run", lambda *_: pytest.fail("it took it"))
    file = tmp_path / "gpu.jsonl"
    with recorded(rich_snapshot, file) as source:
        source()
    with opened(file) as recording, pytest.raises(SetupError, match="there is no such GPU"):
        live.replay(options("--replay", str(file), "-o", "9"), recording)


def test_once_waits_for_rates_however_long_the_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Latest()

    def made(latest: Latest, interval: float, first: float, wait: object) -> Callable[[], Snapshot]:
        return fresh(latest, interval, first, now=lambda: clock.at, wait=clock.wait)

    monkeypatch.setattr(top, "fresh", made)
    assert top.run(options("--once", "--json", "--interval", "20"), lambda: at(int(clock.at), int(clock.at // 20))) == 0
    assert loads(capsys.readouterr().out).interval_ns == 1


def test_a_snapshot_that_comes_again_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plain, "ticks", lambda *_: iter(range(3)))
    snapshots = iter([at(1), at(1), at(2)])
    assert plain.show(options("--json"), lambda: next(snapshots), alone=False) == 0
    assert [loads(line).at_ns for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_closed_streams_are_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert plain.is_plain(options())


def test_a_gpu_that_is_not_there_has_nothing_to_do_with_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "fetch", lambda _: None)
    monkeypatch.setattr(observer, "Observer", lambda _: nullcontext(SimpleNamespace(snapshot=rich_snapshot)))
    with pytest.raises(SetupError, match=r"^--only 9: there is no such GPU"):
        top.act(main.parsers()[1].parse_args(["--once", "-o", "9"]))


def test_without_an_agent_enforcement_is_shown_as_off() -> None:
    assert "no agent: enforcement is off" in drawn(replace(rich_snapshot(), enforcing=False), alone=True)[0]


def test_a_policy_that_was_refused_is_shown_as_refused() -> None:
    assert "policy refused" not in "".join(drawn(replace(rich_snapshot(), policy_error=None)))
    refused = replace(rich_snapshot(), policy_error="line 3: no such key\nline 4: no unit")
    assert "policy refused, what was in force stays: line 3: no such key (and 1 more)" in "\n".join(drawn(refused))
    alone = replace(refused, policy_error="another agent enforces here", policy_wall_ns=None)
    assert "policy refused, none is in force: another agent enforces here" in "\n".join(drawn(alone))


def test_the_next_snapshot_is_not_asked_for_before_it_is_due() -> None:
    asked: list[float] = []
    clock = Latest(at(1_000_000_000, 500_000_000), at(1_500_000_000, 500_000_000))
    clock.at = 1.1

    def latest() -> Snapshot | None:
        asked.append(clock.at)
        return clock()

    source = fresh(latest, 1.0, now=lambda: clock.at, wait=clock.wait)
    assert [source().at_ns, source().at_ns] == [1_000_000_000, 1_500_000_000]
    assert asked == [pytest.approx(1.1), pytest.approx(1.5)]


def test_a_wait_can_be_interrupted() -> None:
    with pytest.raises(Stopped):
        fresh(lambda: None, 1.0, now=lambda: 0.0, wait=lambda _: True)()


def test_a_tick_that_took_longer_than_the_interval_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    times = iter([0.0, 1.2, 1.3, 1.4])
    monkeypatch.setattr("agent.tui.plain.time.monotonic", lambda: next(times))
    due = plain.ticks(1.0, waited.append)
    next(due)
    next(due)
    assert waited == [0.0]


def test_a_frozen_container_is_shown_as_frozen() -> None:
    key = next(key for key, status in rich_snapshot().enforcement.items() if status.role == "offline")
    status = replace(rich_snapshot().enforcement[key], rungs=("freeze", "mps"))
    assert "frozen" in "".join(drawn(replace(rich_snapshot(), enforcement={key: status}), width=160))
