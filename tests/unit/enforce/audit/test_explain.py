# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Why a container was slowed: an hour is kept, within bounds, and shown in plain words."""

from __future__ import annotations

import io
import json
import threading
import tracemalloc
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import SetupError, WardenError
from agent.core.snapshot_json import decode
from enforce.audit import text
from enforce.audit.decision_log import DecisionRecord, to_line
from enforce.audit.history import MOST_CONTAINERS, DecisionHistory
from enforce.audit.intervals import GAP_NS, KEPT_NS, MOST_INTERVALS, Track, thinned
from enforce.audit.log_reader import read
from enforce.audit.model import ContainerHistory, ContainerInfo, DecisionEffect, Explanation, OfflineInterval, choose
from enforce.audit.recorder import EffectRecord, effect_line
from enforce.model import Reading
from enforce.policy.load import parse
from enforce.policy.model import OnlineRule
from gpuwarden.explain import answer, show
from tests.support.decisions import BASE, CHAT, NS, OFFSET, TRAIN, at


def history_of(*decisions: DecisionRecord, now_seconds: float) -> DecisionHistory:
    history = DecisionHistory(now=lambda: (int(now_seconds * NS), OFFSET))
    for decision in decisions:
        history.update_containers([TRAIN, CHAT], decision.wall_ns - OFFSET)
        history.record_decision(decision, decision.wall_ns - OFFSET)
    return history


def story_of(history: DecisionHistory, key: str = TRAIN.key) -> ContainerHistory:
    story = history.explain(key).story
    assert story is not None
    return story


def test_decisions_of_one_reason_are_one_interval_and_another_reason_begins_another() -> None:
    same = [at(n / 10, reason=f"slack {n}%: waiting to grow", share_after=1 - n / 100) for n in range(20)]
    cut = [at(2 + n / 10, reason="target missed by 5%: shorter queue", max_queued_ns=1_000_000) for n in range(10)]
    first, second = story_of(history_of(*same, *cut, now_seconds=3)).intervals
    assert (first.since_ns, first.until_ns) == (OFFSET, OFFSET + 2 * NS)
    assert (first.share_low, first.share_high, first.decisions) == (0.81, 1.0, 20)
    ((reason, why),) = first.reasons.items()
    assert (reason, why.text, round(why.seconds, 3)) == ("slack #%: waiting to grow", "slack 19%: waiting to grow", 2.0)
    assert (second.since_ns, second.queued_low_ns, round(second.whom[CHAT.key].seconds, 3)) == (
        OFFSET + 2 * NS,
        1_000_000,
        0.9,
    )


def test_what_it_was_stopped_belongs_to_the_interval_in_which_it_was_stopped() -> None:
    free = at(0, pauses=7, paused_seconds=3.0)  # of an earlier time
    held = at(1, reason="target missed: half", pauses=7, paused_seconds=3.0)
    after = at(2, reason="slack 20%: larger share", pauses=9, paused_seconds=3.5)
    found = story_of(history_of(free, held, after, now_seconds=2)).intervals
    assert [(one.pauses, one.paused_seconds) for one in found] == [(0, 0.0), (2, 0.5), (0, 0.0)]


def test_time_without_decisions_is_in_no_interval() -> None:
    first, second = story_of(history_of(at(0), at(1), at(60), at(61), now_seconds=61)).intervals
    assert (first.until_ns, second.since_ns) == (OFFSET + NS, OFFSET + 60 * NS)


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    history = history_of(at(0), at(1), at(3000, reason="other"), now_seconds=3601 + 1)
    assert [one.since_ns - OFFSET for one in story_of(history).intervals] == [3000 * NS]


def test_what_a_decision_brought_is_found_with_the_decision() -> None:
    history = history_of(at(0), at(1), at(2, reason="cut"), at(3, reason="cut"), now_seconds=3)
    history.record_effect(TRAIN.key, DecisionEffect(2 * NS, NS, 58e6, 43e6, -0.16, 0.14))
    history.record_effect("docker:gone", DecisionEffect(2 * NS, NS, None, None, None, None))
    first, second = story_of(history).intervals
    assert first.brought is None
    assert second.brought is not None
    assert (second.brought.decided_ns, second.brought.latency_ns) == (OFFSET + 2 * NS, 43e6)


def test_an_online_container_has_how_its_slo_was_kept_and_what_was_slowed_for_it() -> None:
    history = history_of(at(0, share_after=0.5), at(1, share_after=0.4), at(2), now_seconds=2)
    for seconds, latency in ((0, 40e6), (1, 60e6), (2, None)):
        reading = None if latency is None else Reading(seconds * NS, 0.99, latency, 100, None, None, 0)
        history.record_reading(CHAT.key, online_rule(), reading, seconds * NS)
    story = story_of(history, CHAT.key)
    assert [(one.kept_seconds, one.missed_seconds, one.unknown_seconds) for one in story.kept] == [
        (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0),
    ]  # fmt: skip
    (slowed,) = story.slowed
    assert (slowed.key, slowed.seconds, slowed.share_low) == (TRAIN.key, 2.0, 0.4)


def online_rule() -> OnlineRule:
    slo = "{signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}"
    lines = "version: 1", "online:", "- name: chat", "  match: {container: chat}", f"  slo: {slo}"
    return parse("\n".join(lines), "policy.yaml").online[0]


@given(
    st.lists(st.tuples(st.floats(0.01, 20), st.sampled_from("abcdef"), st.booleans(), st.floats(0, 1)), max_size=400)
)
def test_merging_neither_loses_nor_invents_time(steps: list[tuple[float, str, bool, float]]) -> None:
    history, now, paused = DecisionHistory(), 0, 0.0
    watched: dict[bool, float] = {True: 0.0, False: 0.0}
    before: bool | None = None
    for seconds, reason, acted, share in steps:
        now += int(seconds * NS)
        if before is not None and seconds * NS <= GAP_NS:
            watched[before] += int(seconds * NS) / NS
        before = acted
        paused += share * seconds if acted else 0.0
        history.record_decision(
            replace(BASE, reason=reason, acted=acted, share_after=share, paused_seconds=paused), now
        )
    track: Track[OfflineInterval] = history._offline.get(TRAIN.key, Track())
    lengths = dict.fromkeys((True, False), 0.0)
    for one in track.intervals:
        lengths[one.acted] += (one.until_ns - one.since_ns) / NS
        assert sum(why.seconds for why in one.reasons.values()) <= (one.until_ns - one.since_ns) / NS + 1e-6
        assert one.share_low <= one.share_high
    assert len(track.intervals) <= MOST_INTERVALS * 3 // 2
    assert all(a.until_ns <= b.since_ns for a, b in zip(track.intervals, track.intervals[1:], strict=False))
    if now <= KEPT_NS and not track.forgotten:
        assert lengths == pytest.approx(watched, abs=1e-3)


@given(st.integers(1, 200), st.integers(1, 50))
def test_thinning_gives_no_more_than_was_asked_for(count: int, most: int) -> None:
    made = []
    for n in range(count):
        one = story_of(history_of(at(0), now_seconds=0)).intervals[0]
        one.since_ns, one.until_ns = n * NS, (n + 1) * NS
        made.append(one)
    found = thinned(made, count * NS, most)
    assert len(found) == min(count, most)
    assert (found[0].since_ns, found[-1].until_ns) == (0, count * NS)


def test_a_hundred_containers_whose_every_decision_is_another_one_take_a_few_megabytes() -> None:
    history = DecisionHistory()
    tracemalloc.start()
    try:
        for n in range(120):
            for container in range(100):
                decision = at(n, container=f"docker:{container}", reason=f"{'abcdefgh'[n % 8]}", share_after=n % 7 / 7)
                history.record_decision(decision, n * NS)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 8 << 20


def test_no_more_containers_are_kept_than_there_is_room_for_and_that_is_counted() -> None:
    history = DecisionHistory()
    for n in range(MOST_CONTAINERS + 10):
        history.record_decision(at(0, container=f"docker:{n}"), 0)
    assert len(history._offline) == MOST_CONTAINERS
    assert history.explain().forgotten == {"containers": 10}


def test_a_container_that_is_gone_is_remembered_for_as_long_as_there_is_something_to_say() -> None:
    history = history_of(at(0), at(1), now_seconds=10)
    history.update_containers([CHAT], 10 * NS)
    assert {info.key for info in history.explain().containers} == {TRAIN.key, CHAT.key}
    history.update_containers([CHAT], KEPT_NS + 10 * NS)
    assert {info.key for info in history.explain().containers} == {CHAT.key}
    assert history.explain(TRAIN.key).story is None


def test_a_query_about_all_containers_lets_decisions_through_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(TRAIN, key="docker:bbbb2222", name="other")
    history = DecisionHistory(now=lambda: (2 * NS, OFFSET))
    history.update_containers((TRAIN, other, CHAT), 0)
    for info in (TRAIN, other):
        history.record_decision(at(0, container=info.key), 0)

    def while_deciding(intervals: list[OfflineInterval], now_ns: int, most: int) -> list[OfflineInterval]:
        deciding = threading.Thread(target=history.record_decision, args=(at(1, container=other.key, law="fixed"), NS))
        deciding.start()
        deciding.join(timeout=10)
        assert not deciding.is_alive(), "it waits until all containers are copied and thinned"
        return thinned(intervals, now_ns, most)

    monkeypatch.setattr("enforce.audit.history.thinned", while_deciding)
    assert {(info.name, one.law) for info, one in history.recent_intervals(6)} == {
        ("train", "headroom"),
        ("other", "headroom"),
        ("other", "fixed"),
    }


def test_the_answer_is_one_line_that_reads_back_as_what_it_was() -> None:
    history = history_of(at(0, troubles={"freeze": "no cgroup\nv2"}), at(1, reason="cut"), now_seconds=1)
    history.record_effect(TRAIN.key, DecisionEffect(0, NS, None, 43e6, None, 0.14))
    line = answer(history, TRAIN.key)
    assert "\n" not in line
    assert decode(Explanation, json.loads(line), "it") == history.explain(TRAIN.key)
    with pytest.raises(WardenError, match="nothing is known about docker:none"):
        answer(history, "docker:none")


@pytest.mark.parametrize(
    "wanted", ["docker:aaaa1111", "train", "train-0", "batch/train-0", "batch/train-0/train", "aaaa1111", "aaaa"]
)
def test_a_container_is_found_by_each_of_its_names(wanted: str) -> None:
    assert choose(wanted, [CHAT, TRAIN]) == TRAIN


@pytest.mark.parametrize("wanted", ["aaa", "train-", "other/train-0", "", "c"])
def test_an_unknown_name_lists_what_there_is(wanted: str) -> None:
    with pytest.raises(WardenError, match="these containers are known") as error:
        choose(wanted, [CHAT, TRAIN])
    assert "docker:aaaa1111" in str(error.value)
    assert "docker:cccc2222" in str(error.value)


def test_a_name_of_two_containers_asks_for_a_key() -> None:
    twin = replace(TRAIN, key="docker:aaaa3333", id="aaaa3333")
    for wanted in ("train", "aaaa"):
        with pytest.raises(WardenError, match="more than one") as error:
            choose(wanted, [TRAIN, twin, CHAT])
        assert "docker:aaaa3333" in str(error.value)
        assert "docker:cccc2222" not in str(error.value)


def test_a_name_that_moves_the_cursor_is_shown_and_not_obeyed() -> None:
    with pytest.raises(WardenError) as error:
        choose("x", [replace(TRAIN, name="a\x1b[2Jb")])
    assert "\x1b" not in str(error.value)


def shown(history: DecisionHistory, key: str = TRAIN.key, **of: Any) -> str:
    found = history.explain(key)
    assert found.story is not None
    out = io.StringIO()
    show(replace(found, **of), found.story, OFFSET, out)
    return out.getvalue()


def test_the_text_has_when_how_much_for_what_container_by_which_rungs_why_and_the_effect() -> None:
    cut = at(1, reason="target missed by 16%: smaller share", share_after=0.35, latency_ns=58e6)
    end = at(61, reason="slack 20%: larger share", share_after=0.4, pauses=12, paused_seconds=15.0)
    steps = [replace(cut, wall_ns=OFFSET + n * NS) for n in range(1, 61, 10)]
    history = history_of(at(0), *steps, end, now_seconds=61)
    history.record_effect(TRAIN.key, DecisionEffect(11 * NS, 10 * NS, 58e6, 43e6, -0.16, 0.14))
    blocks = text.blocks(story_of(history), UTC)
    assert blocks[1] == text.Block(
        "08:00:01–08:01:01 (60 s)  share 35 %, queue up to 2 ms, stopped 25 %",
        (
            ("for", "server on GPU-1: p99 within 50 ms; it was up to 58 ms, over it for 60 s"),
            ("by", "gate, pace; rule training, law headroom"),
            ("why", "target missed by 16%: smaller share (60 s)"),
            ("then", "10 s after the last step: p99 58 ms → 43 ms, slack -16 % → 14 %"),
        ),
    )
    shown_text = shown(history)
    assert shown_text.startswith("batch/train-0: train (offline, rule training)\n")
    assert "stopped 12 times" in shown_text
    assert max(len(line) for line in shown_text.split("\n")) <= 80


def test_a_terminal_without_utf_8_gets_ascii() -> None:
    history = history_of(at(0), at(1, reason="größer → kleiner"), now_seconds=1)
    found, out = history.explain(TRAIN.key), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert found.story is not None
    show(found, found.story, OFFSET, out)
    out.seek(0)
    assert "gr\\xf6\\xdfer to kleiner" in out.read()


def test_a_policy_that_does_not_enforce_only_watched() -> None:
    history = history_of(at(0, acted=False, rungs=()), at(1, acted=False, rungs=()), now_seconds=1)
    assert "only watched" in shown(history)
    assert "`enforce: false`" in shown(history)


def test_a_container_without_a_rule_is_never_slowed() -> None:
    history = DecisionHistory(now=lambda: (NS, OFFSET))
    history.update_containers([ContainerInfo("host", "host", role="unmatched", reason="no rule matches")], 0)
    assert "it is never slowed: no rule matches" in shown(history, "host")


def test_a_rung_that_could_not_act_is_named_with_its_obstacle() -> None:
    history = history_of(at(0, troubles={"freeze": "its cgroup holds other processes"}), at(1), now_seconds=1)
    assert ("but", "freeze: its cgroup holds other processes") in text.blocks(story_of(history), UTC)[0].rows


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.6, "60 s"), (125, "2 min"), (7200, "2 h 0 min")]
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert text.duration(seconds) == words


@given(st.lists(st.none() | st.floats(0, 1e12), min_size=1, max_size=2))
def test_what_is_unknown_is_never_written_as_a_figure(values: list[float | None]) -> None:
    shown_text = text.milliseconds_range(*values)
    assert (shown_text == "unknown") is all(value is None for value in values)


def log_of(folder: Path, *lines: bytes, name: str = "decisions.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join(lines))
    return path


def effect(decision: DecisionRecord, **changed: Any) -> bytes:
    what = EffectRecord(
        wall_ns=decision.wall_ns + 10 * NS,
        container=decision.container,
        device="GPU-1",
        ruler=CHAT.key,
        decision_wall_ns=decision.wall_ns,
        window_ns=10 * NS,
        latency_ns=43e6,
        samples=100,
        target_ns=50_000_000,
        slack_ratio=0.14,
        share=0.4,
        max_queued_ns=2_000_000,
        paused_ratio=0.25,
    )
    return effect_line(replace(what, **changed))


def test_a_decision_log_gives_the_same_history_as_the_agent(tmp_path: Path) -> None:
    steps = [at(0), at(5, reason="cut", latency_ns=58e6, slack_ratio=-0.16), at(10, pauses=3, paused_seconds=1.5)]
    log_of(tmp_path, to_line(steps[0], 0), name="decisions.jsonl.1")
    path = log_of(tmp_path, *(to_line(one, 0) for one in steps[1:]), effect(steps[1]))
    history, bad = read(path, OFFSET + 60 * NS)
    live = history_of(*steps, now_seconds=60)
    live.record_effect(TRAIN.key, DecisionEffect(5 * NS, 10 * NS, 58e6, 43e6, -0.16, 0.14))
    assert bad == 0
    assert history.explain().since_wall_ns == OFFSET
    assert story_of(history).intervals == story_of(live).intervals
    assert choose("batch/train-0", history.explain().containers).key == TRAIN.key
    assert choose("server", history.explain().containers).role == "online"
    assert [(one.kept_seconds, one.missed_seconds) for one in story_of(history, CHAT.key).kept] == [
        (5.0, 0.0), (0.0, 5.0), (0.0, 0.0),
    ]  # fmt: skip


@given(st.lists(st.binary(max_size=80) | st.just(to_line(at(0), 0)[:-1]) | st.just(b'{"wall_ns":1}'), max_size=20))
def test_whatever_is_in_a_decision_log_is_read_or_counted(lines: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = log_of(Path(folder), b"\n".join(lines))
        history, _ = read(path, OFFSET + NS)
        assert len(history.explain().containers) <= 2


@pytest.mark.parametrize(
    "change",
    [{"rule": 3}, {"target_ns": "x"}, {"rungs": 5}, {"latency_ns": "soon"}, {"troubles": [1]}, {"device": None}],
)
def test_a_line_with_wrong_values_is_read_or_counted_and_hinders_no_other(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    record = {**json.loads(to_line(at(1), 0)), **change}
    path = log_of(tmp_path, to_line(at(0), 0), json.dumps(record).encode() + b"\n", to_line(at(2), 0))
    history, bad = read(path, OFFSET + 3 * NS)
    assert bad in (0, 1)
    assert story_of(history).intervals[-1].until_ns == OFFSET + 3 * NS
    assert shown(history)


def test_the_last_line_of_a_log_stays_in_force_for_a_while(tmp_path: Path) -> None:
    path = log_of(tmp_path, to_line(at(0), 0))
    for seconds, length in ((8, 8 * NS), (3000, 0)):
        (only,) = story_of(read(path, OFFSET + seconds * NS)[0]).intervals
        assert only.until_ns - only.since_ns == length


def test_a_missing_log_is_an_error_that_names_the_file_to_pass(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="run --decisions"):
        read(tmp_path / "none", OFFSET)
    with pytest.raises(SetupError, match="run --decisions"):
        read(tmp_path, OFFSET)
