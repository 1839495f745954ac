# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop live, driven by keys as a person would, on a terminal that is not there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from textual.message_pump import MessagePump
from textual.pilot import Pilot

from agent.core.errors import SetupError
from agent.core.model import ContainerKey, Snapshot
from agent.core.snapshot_json import dumps
from agent.core.text import UTF8
from agent.tui.history import DecisionBlock, ObservedChange
from agent.tui.listing import Order, View
from agent.tui.live import run as live
from agent.tui.live.app import Setting, Top
from agent.tui.live.feed import Failed, ReplayFeed, SnapshotReceived
from agent.tui.recording import opened, recorded
from agent.tui.view import ListOptions
from tests.support.snapshots import rich_snapshot

SECOND = 1_000_000_000
Act = Callable[[Pilot[None], Top], Awaitable[None]]


class StillFeed:
    """A feed of one snapshot; further ones are posted by the test."""

    def __init__(self) -> None:
        self.played: list[bool] = []

    def start(self, top: MessagePump) -> None:
        top.post_message(SnapshotReceived(rich_snapshot()))

    def seek(self, step: int) -> None:
        pass

    def play(self, playing: bool) -> None:
        self.played.append(playing)


def drive(
    act: Act,
    size: tuple[int, int] = (120, 40),
    setting: Setting | None = None,
    feed: StillFeed | ReplayFeed | None = None,
) -> Top:
    """Runs it, and acts once the first snapshot is on the screen."""
    top = Top(setting or Setting(View.CONTAINER, UTF8), feed or StillFeed())

    async def run() -> None:
        async with top.run_test(size=size) as pilot:
            await pilot.pause()
            await act(pilot, top)

    asyncio.run(run())
    return top


def shown(top: Top) -> list[str]:
    """What is on the screen, line by line."""
    return ["".join(segment.text for segment in strip) for strip in top.screen._compositor.render_strips()]


def text(top: Top) -> str:
    return "\n".join(shown(top))


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50), (40, 10)])
def test_devices_are_on_top_the_list_below_and_the_keys_at_the_foot(size: tuple[int, int]) -> None:
    async def act(_: Pilot[None], top: Top) -> None:
        lines = shown(top)
        assert len(lines) == size[1]
        assert {len(line) for line in lines} == {size[0]}
        assert lines[0].startswith("GPU Warden")
        assert lines[1].startswith("GPU 0")
        assert " h help" in lines[-1]
        if size[1] > 20:
            assert any(line.startswith("trainer") for line in lines)

    drive(act, size)


def test_keys_change_the_view_the_tree_and_the_order() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("2")
        assert "COMMAND" in text(top)
        await pilot.press("3")
        assert "├─ trainer" in text(top)
        await pilot.press("1", "t")
        assert "└─ 100 vllm serve" in text(top)
        await pilot.press("full_stop")
        assert top.list_options.order == Order("memory")
        assert "MEM▼" in text(top)
        await pilot.press("slash")
        assert "MEM▲" in text(top)
        await pilot.press("comma", "comma")
        assert top.list_options.order == Order("gpu")

    drive(act)


def test_a_filter_leaves_what_matches_and_escape_shows_everything_again() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("backslash", *"trai")
        assert "twin" not in text(top)
        assert "trainer" in text(top)
        await pilot.press("enter", "t")
        assert top.list_options.tree, "keys are keys again"
        assert "filter: trai" in text(top)
        await pilot.press("escape")
        assert "twin" in text(top)
        await pilot.press("backslash", "x", "escape")
        assert top.list_options.wanted == ""
        await pilot.press("backslash", *"trai", "enter", "f3", "x", "escape")
        assert top.list_options.wanted == "trai", "a search takes only its own word back"

    drive(act)


def test_a_search_moves_the_cursor_from_one_match_to_the_next() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("f3", *"twin")
        assert top._listing.line is not None
        first = top._listing.cursor
        assert top._listing.line.entry.names["name"] == "twin"
        await pilot.press("f3")
        assert top._listing.cursor > first
        await pilot.press("enter", "n")
        assert top._listing.cursor == first

    drive(act)


def test_the_cursor_stays_with_its_entry_and_the_foot_speaks_of_it() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("f3", *"trainer", "enter")
        assert "trainer: paused 35%; slack 75 %: growing by 2 % of the device; freeze could not be done" in text(top)
        before = top._listing.cursor
        await pilot.press("full_stop", "slash")
        assert top._listing.cursor != before
        assert top._listing.line is not None
        assert top._listing.line.entry.container == "c2"
        await pilot.press("end", "home", "pagedown", "pageup", "down", "up")
        assert top._listing.cursor == 0

    drive(act)


def test_a_paused_display_stands_still_while_the_history_goes_on() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("p")
        before = shown(top)
        idle = [replace(reading, sm_activity_ratio=0.0) for reading in rich_snapshot().devices]
        later = replace(rich_snapshot(), at_ns=9 * SECOND, containers=(), devices=tuple(idle))
        top.post_message(SnapshotReceived(later))
        await pilot.pause()
        top.draw()
        await pilot.pause()
        assert "PAUSED" in text(top)
        assert shown(top) == before, "the graphs stand still, too"
        assert len(top.history.ticks) == 2
        await pilot.press("space")
        assert "PAUSED" not in text(top)
        assert "trainer" not in text(top)

    drive(act)


def test_columns_are_chosen() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        assert "CLASS" in text(top)
        await pilot.press("c", "down", "space")
        assert "[ ] CLASS" in text(top)
        await pilot.press("escape")
        assert top.list_options.hidden == {"role"}
        assert "CLASS" not in text(top)

    drive(act)


def test_enter_opens_a_container_and_escape_goes_back() -> None:
    def tell(key: ContainerKey) -> Sequence[DecisionBlock]:
        return [ObservedChange(f"decided for {key}", (("why", "a good reason"),))]

    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("f3", *"trainer", "enter", "enter")
        await top.workers.wait_for_complete()
        await pilot.pause()
        assert "a good reason" in text(top)
        assert "decided for c2" in text(top)
        assert "gemm" in text(top)
        top.post_message(SnapshotReceived(replace(rich_snapshot(), at_ns=9 * SECOND, containers=())))
        await pilot.pause()
        assert "The container has gone." in text(top)
        await pilot.press("escape")
        assert "CONTAINER" in text(top)

    drive(act, setting=Setting(View.CONTAINER, UTF8, ask_decisions=tell))


def test_an_agent_that_cannot_be_asked_for_decisions_is_reported_as_one() -> None:
    def tell(_: ContainerKey) -> Sequence[DecisionBlock]:
        raise SetupError("the agent does not answer")

    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("enter")
        await top.workers.wait_for_complete()
        await pilot.pause()
        assert "the agent does not answer" in text(top)

    drive(act, setting=Setting(View.CONTAINER, UTF8, ask_decisions=tell))


def test_help_lists_the_keys() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("h")
        assert "choose the columns" in text(top)
        assert max(len(line.rstrip()) for line in shown(top)) <= 80
        assert "quit" not in shown(top)[-1], "q goes back here"
        await pilot.press("escape")
        assert "CONTAINER" in text(top)

    drive(act, (80, 24))


def test_a_failure_is_shown_until_the_next_snapshot() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        top.post_message(Failed("the agent has\x1b[31m stopped"))
        await pilot.pause()
        assert r"the agent has\x1b[31m stopped" in text(top)
        top.post_message(SnapshotReceived(replace(rich_snapshot(), at_ns=9 * SECOND)))
        await pilot.pause()
        assert "stopped" not in text(top)

    drive(act)


def test_what_was_logged_stays_at_the_foot() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        live._FootHandler(top).emit(
            logging.makeLogRecord({"name": "gputop", "msg": "recording has ended", "created": 0})
        )
        await pilot.pause()
        top.post_message(SnapshotReceived(replace(rich_snapshot(), at_ns=9 * SECOND)))
        await pilot.pause()
        assert ":00 gputop: recording has ended" in text(top)

    drive(act)


def test_the_lists_keys_do_nothing_while_something_is_over_it() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("f3", *"trainer", "enter", "enter", "enter", "t", "2", "backslash")
        assert len(top.screen_stack) == 2
        assert top.list_options == ListOptions()
        await pilot.press("escape", "t")
        assert top.list_options == ListOptions(tree=True)

    drive(act)


def test_a_page_that_has_become_shorter_is_scrolled_back() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("f3", *"trainer", "enter", "enter", "pagedown", "pagedown")
        assert "SM" not in shown(top)[0]
        top.post_message(SnapshotReceived(replace(rich_snapshot(), at_ns=9 * SECOND, containers=())))
        await pilot.pause()
        assert "The container has gone." in text(top)

    drive(act, (80, 12))


def test_a_terminal_that_changes_its_size_is_filled() -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        assert "RUNTIME/POD" not in text(top)
        await pilot.resize_terminal(200, 50)
        await pilot.pause()
        assert "RUNTIME/POD" in text(top)
        assert len(shown(top)) == 50

    drive(act, (80, 24))


@pytest.mark.parametrize("key", ["q", "f10", "ctrl+c"])
def test_it_ends_with_a_key(key: str) -> None:
    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press(key)

    assert drive(act).return_code == 0


def test_what_is_wrong_stands_out() -> None:
    async def act(_: Pilot[None], top: Top) -> None:
        styles = {
            segment.text.strip(): segment.style for strip in top.screen._compositor.render_strips() for segment in strip
        }
        loud = styles["lost events: launches:full 12"]
        assert loud is not None
        assert loud.color is not None

    drive(act)


def test_without_colours_none_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(_: Pilot[None], top: Top) -> None:
        styles = [segment.style for strip in top.screen._compositor.render_strips() for segment in strip]
        colours = {colour.name for style in styles if style for colour in (style.color, style.bgcolor) if colour}
        assert colours <= {"default"}

    drive(act)


def test_a_replay_plays_stands_still_and_is_sought(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    ticks = iter([replace(rich_snapshot(), at_ns=second * SECOND) for second in range(1, 6)])
    with recorded(lambda: next(ticks), file) as source:
        for _ in range(5):
            source()

    async def act(pilot: Pilot[None], top: Top) -> None:
        assert "replay 1/5" in text(top)
        await pilot.press("end")
        await pilot.pause()
        assert "replay 5/5" in text(top)
        assert "PAUSED" in text(top)
        assert len(top.history.ticks) == 5, "the graphs have what was before"
        await pilot.press("left")
        await pilot.pause()
        assert "replay 4/5" in text(top)
        assert len(top.history.ticks) == 4
        await pilot.press("right", "right")
        await pilot.pause()
        assert "replay 5/5" in text(top)
        await pilot.press("home")
        await pilot.pause()
        assert "replay 1/5" in text(top)
        await pilot.press("space")
        playing._advance()
        await pilot.pause()
        assert "replay 2/5" in text(top)
        assert "PAUSED" not in text(top)

    with opened(file) as recording:
        playing = ReplayFeed(recording, lambda snapshot: snapshot, 3600.0)
        drive(act, setting=Setting(View.CONTAINER, UTF8, replaying=True), feed=playing)


def test_seeking_reads_each_tick_once_and_goes_past_one_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "gpu.jsonl"
    lines = [dumps(replace(rich_snapshot(), at_ns=second * SECOND)) for second in range(1, 41)]
    lines[9] = "{"
    file.write_text("\n".join(lines))
    read: list[int] = []

    def narrow(snapshot: Snapshot) -> Snapshot:
        read.append(snapshot.at_ns // SECOND)
        return snapshot

    async def act(pilot: Pilot[None], top: Top) -> None:
        await pilot.press("end")
        await pilot.pause()
        assert "replay 40/40" in text(top)
        assert [tick.at_ns // SECOND for tick in top.history.ticks] == list(range(11, 41))
        read.clear()
        await pilot.press("left")
        await pilot.pause()
        assert "replay 39/40" in text(top)
        assert len(top.history.ticks) == 29
        assert read == [39]

    with opened(file) as recording:
        playing = ReplayFeed(recording, narrow, 3600.0)
        drive(act, setting=Setting(View.CONTAINER, UTF8, replaying=True), feed=playing)
