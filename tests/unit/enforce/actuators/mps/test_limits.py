# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the online side leaves over, which clients to limit, and what is recorded to be undone. Made-up daemons."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    Process,
    ProcessId,
    Snapshot,
    Usage,
)
from agent.node.procfs import Procfs
from enforce.actuators.mps import rung as rung_module
from enforce.actuators.mps.daemons import is_daemon
from enforce.actuators.mps.limits import MIN_SAMPLES, OnlineActivity, percent, quota
from enforce.actuators.mps.limits import changes as limit_changes
from enforce.actuators.mps.model import Daemon, MpsClient, MpsError, MpsServer, MpsSetting, Scope
from enforce.actuators.mps.protocol2 import mebibytes
from enforce.actuators.mps.restore import LimitChange, from_place, put_back, to_place
from enforce.actuators.mps.rung import Mps
from enforce.actuators.mps.survey import MpsEndpoint, MpsState, MpsSurvey, obstacle_to_limits
from enforce.ledger.entries import MAX_LINE_BYTES, LedgerEntry, UndoOutcome, intend_line
from enforce.model import Subject
from enforce.policy.load import parse
from enforce.policy.model import OfflineRule
from enforce.workloads import Workload, workloads_of

GPU = DeviceUuid("GPU-0")
POLICY = """
version: 1
online: [{name: chat, match: {container: chat}, slo: {signal: gpu_wait, quantile: 0.9, target: 5ms, window: 1s}}]
offline:
  - {name: batch, match: {container: "batch*"}, limits: {memory: 2GiB, floor: 10%}, ladder: [pace, mps]}
"""
DAEMON = Daemon(ProcessId(5, 1), "/run/mps", "nvidia-cuda-mps-control")
ONE, TWO = Scope("7"), Scope("8")
TGIDS = {"batch": 10, "batch-2": 11, "chat": 20}


def seats_of(*names: str, policy: str = POLICY) -> dict[ContainerKey, Workload]:
    members = []
    for name in names:
        container = Container(ContainerKey(name), name, "docker")
        process = Process(ProcessId(TGIDS[name], 1), name, "root", container.key)
        members.append(GpuProcess(process, container, (GPU,)))
    return workloads_of(parse(policy, "p"), members, Snapshot(0, 0, 0))


def subject() -> Subject:
    seat = seats_of("batch")[ContainerKey("batch")]
    rule = seat.classification.rule
    assert isinstance(rule, OfflineRule)
    return Subject(seat.container, (ProcessId(10, 1),), frozenset({GPU}), rule)


def activity(*ratios: float | None) -> OnlineActivity:
    learned = OnlineActivity()
    for second, ratio in enumerate(ratios):
        usage = Usage(GPU, ratio, None, None, None, None, None)
        row = ContainerUsage(Container(ContainerKey("chat"), "chat", "docker"), (usage,), ())
        reading = DeviceReading(Device(0, GPU, "GPU", "0", 1, 1))
        for _ in range(2):  # ten decisions see the same snapshot
            learned.observe(seats_of("chat"), Snapshot(second * 10**9, 0, 0, (reading,), (row,)))
    return learned


@given(st.lists(st.floats(0, 2), min_size=MIN_SAMPLES, max_size=100))
def test_no_more_is_given_than_the_online_side_leaves_at_its_busiest_but_one_in_twenty(ratios: list[float]) -> None:
    left = activity(*ratios).left_over_percent(GPU)
    assert left is not None
    busier = [ratio for ratio in ratios if min(1.0, ratio) * 100 > 100 - left + 1e-6]
    assert 0 <= left <= 100
    assert len(busier) <= len(ratios) / 20


def test_with_too_few_or_unknown_figures_nothing_is_known() -> None:
    assert activity(*[0.5] * (MIN_SAMPLES - 1)).left_over_percent(GPU) is None
    assert activity(*[None] * 50).left_over_percent(GPU) is None
    assert percent(subject(), activity()) is None


def test_old_figures_are_forgotten() -> None:
    assert activity(*[0.9] * 100, *[0.2] * 620).left_over_percent(GPU) == 80


@pytest.mark.parametrize(("busy", "wanted"), [(0.6, "40"), (0.605, "39"), (1.0, "10"), (0.0, "100")])
def test_the_percentage_is_the_rest_and_never_less_than_the_floor(busy: float, wanted: str) -> None:
    assert percent(subject(), activity(*[busy] * 20)) == wanted


def place(connected: dict[int, MpsClient], reached: dict[int, frozenset[Scope]], protocol: int = 2) -> MpsEndpoint:
    @dataclass
    class Speaks:
        protocol: int

    return MpsEndpoint(
        DAEMON,
        None,
        cast(Any, Speaks(protocol)),
        connected=tuple((ProcessId(tgid, 1), client) for tgid, client in connected.items()),
        reached=tuple((ProcessId(tgid, 1), scopes) for tgid, scopes in reached.items()),
    )


EVERYWHERE = frozenset({ONE})


def test_a_quota_is_the_largest_of_those_whom_it_reaches_and_none_where_one_has_none() -> None:
    all_reach = place({}, {10: EVERYWHERE, 11: EVERYWHERE})
    assert quota(ONE, all_reach, seats_of("batch", "batch-2")) == "2048M"
    without = POLICY.replace("memory: 2GiB, ", "")
    assert quota(ONE, all_reach, seats_of("batch", "batch-2", policy=without)) is None
    assert quota(TWO, all_reach, seats_of("batch")) is None


def why_not(found: MpsEndpoint, *names: str) -> str | None:
    return obstacle_to_limits(subject(), MpsState(0, (found,)), seats_of("batch", *names))


def test_a_connected_online_client_is_no_obstacle_and_one_that_could_connect_is() -> None:
    mine, reached = {10: MpsClient(10, "7")}, {10: EVERYWHERE, 20: EVERYWHERE}
    assert why_not(place({**mine, 20: MpsClient(20, "7")}, reached), "chat") is None
    assert "chat reaches the MPS daemon" in (why_not(place(mine, reached), "chat") or "")
    assert why_not(place(mine, {10: EVERYWHERE, 20: frozenset()}), "chat") is None


def test_in_a_namespace_no_other_container_may_be_connected_or_not() -> None:
    mine, reached = {10: MpsClient(10, "7"), 20: MpsClient(20, "7")}, {10: EVERYWHERE, 20: EVERYWHERE}
    assert "chat is in the same MPS namespace" in (why_not(place(mine, reached, protocol=3), "chat") or "")
    assert why_not(place(mine, {10: EVERYWHERE, 20: frozenset({TWO})}, protocol=3), "chat") is None


def test_of_several_users_servers_it_must_be_known_which_one_its_clients_go_to() -> None:
    both = frozenset({ONE, TWO})
    assert "several users' MPS servers (7, 8)" in (why_not(place({}, {10: both})) or "")
    assert why_not(place({10: MpsClient(10, "8")}, {10: both})) is None


def test_without_a_daemon_or_with_one_that_does_not_answer_the_message_has_the_remedy() -> None:
    assert "no MPS control daemon runs here" in (obstacle_to_limits(subject(), MpsState(0), {}) or "")
    hung = MpsEndpoint(DAEMON, "the MPS control daemon at /run/mps did not answer in 2 s: restart it")
    assert "did not answer" in (obstacle_to_limits(subject(), MpsState(0, (hung,)), {}) or "")


@dataclass
class Control:
    """One server's limits in a dictionary."""

    values: dict[MpsSetting, str] = field(default_factory=dict)
    protocol: int = 2
    daemon: Daemon = DAEMON

    def servers(self) -> tuple[MpsServer, ...]:
        return (MpsServer("7", 7, "ACTIVE"),)

    def scopes(self) -> tuple[Scope, ...]:
        return (ONE,)

    def get(self, setting: MpsSetting) -> str:
        return self.values[setting]

    def put(self, setting: MpsSetting, value: str) -> None:
        self.values[setting] = value

    def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[MpsSetting, ...]]:
        return {"percentage": (PERCENT,), "memory": (MEMORY,), "priority": (PRIORITY,)}


PERCENT, MEMORY = MpsSetting("percentage", ONE), MpsSetting("memory", ONE, 0)
PRIORITY = MpsSetting("priority", Scope(""))
FREE = {PERCENT: "100", MEMORY: "81920M", PRIORITY: "0"}


class Stage:
    """The rung, with one offline container's client on a made-up daemon. `look` is a second of decisions."""

    def __init__(self) -> None:
        self.control = Control(dict(FREE))
        self.survey = MpsSurvey(Procfs("/nonexistent"))
        self.rung = Mps(Procfs("/nonexistent"), self.survey)
        where = place({10: MpsClient(10, "7")}, {10: EVERYWHERE})
        self.place = replace(where, control=cast(Any, self.control), ordinals=((GPU, 0),))
        self.seconds = 0

    def look(self, online_ratio: float = 0.6, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.seconds += 1
            self.survey.state = MpsState(1 << 62, (self.place,))  # so new that no survey begins
            usage = Usage(GPU, online_ratio, None, None, None, None, None)
            row = ContainerUsage(Container(ContainerKey("chat"), "chat", "docker"), (usage,), ())
            reading = DeviceReading(Device(0, GPU, "GPU", "0", 1, 80 << 30))
            here = {
                **seats_of("batch"),
                ContainerKey("chat"): replace(seats_of("chat")[ContainerKey("chat")], members=()),
            }
            self.rung.look(here, Snapshot(self.seconds * 10**9, 0, 0, (reading,), (row,)))
            self.rung.watch(self.survey.state)

    def apply(self) -> list[LedgerEntry]:
        """What goes to the ledger, and then what is done."""
        entries = list(self.rung.intents(subject()))
        self.rung.apply(subject())
        return entries

    def put_back(self, *entries: LedgerEntry) -> None:
        for entry in entries:
            for change in from_place(entry.place)[0]:
                put_back(cast(Any, self.control), change)


def test_nothing_is_set_before_it_is_known_what_the_online_side_uses() -> None:
    stage = Stage()
    stage.look(seconds=MIN_SAMPLES - 1)
    assert "not known yet" in (stage.rung.obstacle(subject()) or "")
    with pytest.raises(MpsError, match="not known yet"):
        stage.apply()
    assert stage.control.values == FREE
    stage.look()
    assert stage.rung.obstacle(subject()) is None


def test_limits_are_set_once_and_the_entry_names_everything_that_is_to_be_put_back() -> None:
    stage = Stage()
    stage.look(seconds=20)
    (entry,) = stage.apply()
    limited = {PERCENT: "40", MEMORY: "2048M", PRIORITY: "1"}
    assert stage.control.values == limited
    stage.look(online_ratio=0.9, seconds=60)
    assert stage.apply() == []
    assert stage.control.values == limited
    stage.put_back(entry)
    assert stage.control.values == FREE


def contested(monkeypatch: pytest.MonkeyPatch) -> tuple[Stage, Subject]:
    """A daemon that could be limited for two containers, and the second one."""
    stage = Stage()
    stage.look(seconds=20)
    monkeypatch.setattr(rung_module, "obstacle_to_limits", lambda *_: None)
    return stage, replace(subject(), container=Container(ContainerKey("other"), "other", "docker"))


def test_of_two_containers_that_limit_one_daemon_at_once_the_second_begins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, other = contested(monkeypatch)
    (entry,) = stage.rung.intents(subject())
    for _ in range(2):  # nothing is set yet; then it is
        with pytest.raises(MpsError, match="is limited for batch already"):
            stage.rung.intents(other)
        if stage.control.values == FREE:
            stage.rung.apply(subject())
    stage.put_back(entry)
    assert stage.control.values == FREE


def test_limits_that_never_came_into_force_keep_no_other_container_from_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, other = contested(monkeypatch)
    now = [1]
    monkeypatch.setattr(rung_module, "monotonic_ns", lambda: now[0])
    stage.rung.intents(subject())  # and then the ledger took no entry, say
    now[0] += rung_module.CLAIMED_NS
    assert stage.rung.intents(other)


def test_while_one_container_is_limiting_a_daemon_another_one_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, other = contested(monkeypatch)
    refused: list[str] = []

    def put(setting: MpsSetting, value: str) -> None:
        with pytest.raises(MpsError) as error:
            stage.rung.intents(other)
        refused.append(str(error.value))
        stage.control.values[setting] = value

    monkeypatch.setattr(stage.control, "put", put)
    stage.apply()
    assert len(refused) == len(FREE)


def test_what_was_put_back_is_set_again_as_an_act_of_its_own() -> None:
    stage = Stage()
    stage.look(seconds=20)
    (first,) = stage.apply()
    stage.put_back(first)
    (second,) = stage.apply()
    assert second.id != first.id
    assert stage.control.values[PERCENT] == "40"
    stage.put_back(second)
    assert stage.control.values == FREE


def test_where_another_writer_sets_limits_no_more_are_set_until_the_daemon_is_another() -> None:
    stage = Stage()
    stage.look(seconds=20)
    (entry,) = stage.apply()
    stage.control.values[PERCENT] = "70"
    stage.look()
    assert "another writer" in (stage.rung.obstacle(subject()) or "")
    with pytest.raises(MpsError, match="another writer"):
        stage.apply()
    stage.put_back(entry)
    assert stage.control.values == {**FREE, PERCENT: "70"}
    stage.place = replace(stage.place, daemon=replace(DAEMON, process=ProcessId(6, 1)))
    stage.look()
    assert stage.rung.obstacle(subject()) is None


@dataclass
class OtherReading(Control):
    """It takes a limit of memory, and reads it back as something else, or not at all."""

    reads: str = "7777M"

    def put(self, setting: MpsSetting, value: str) -> None:
        self.values[setting] = value if value == "81920M" or setting != MEMORY else self.reads
        if self.values[setting] != value:
            raise MpsError(f"{value} was accepted, but it is {self.reads or 'none'}")


@pytest.mark.parametrize("reads", ["7777M", "1M", ""])
def test_what_reads_as_something_else_is_put_back_with_all_that_was_set_before(reads: str) -> None:
    stage = Stage()
    stage.control = OtherReading(dict(FREE), reads=reads)
    stage.place = replace(stage.place, control=cast(Any, stage.control))
    stage.look(seconds=20)
    with pytest.raises(MpsError, match="but it is"):
        stage.apply()
    assert stage.control.values == FREE


@pytest.mark.parametrize(
    ("ours", "shown", "outcome"),
    [
        ("1536M", "1024M", UndoOutcome.RESTORED),
        ("1536M", "1536M", UndoOutcome.RESTORED),
        ("1536M", "2048M", UndoOutcome.FOREIGN),
        ("512M", "", UndoOutcome.RUNNING),
        ("512M", "511M", UndoOutcome.FOREIGN),
    ],
)
def test_a_limit_of_memory_is_ours_as_we_set_it_and_in_whole_gibibytes(
    ours: str, shown: str, outcome: UndoOutcome
) -> None:
    control = Control({MEMORY: shown})
    assert put_back(cast(Any, control), LimitChange(MEMORY, "", ours, "81920M")) is outcome
    assert control.values[MEMORY] == ("81920M" if outcome is UndoOutcome.RESTORED else shown)


def test_no_limit_of_memory_is_put_back_as_whole_gibibytes_so_that_it_is_no_stricter() -> None:
    sizes = {GPU: 81559 << 20}
    control = Control({PERCENT: "100", MEMORY: "", PRIORITY: "0"})
    (change,) = limit_changes(place({}, {}), cast(Any, control), ONE, subject(), {"memory": "2048M"}, sizes)
    assert change == LimitChange(MEMORY, "", "2048M", "81920M")


def test_without_ordinals_memory_is_limited_only_where_there_is_one_device() -> None:
    @dataclass
    class Settings(Control):
        def settings(self, scope: Scope, ordinals: tuple[int, ...]) -> dict[str, tuple[MpsSetting, ...]]:
            return {"memory": tuple(MpsSetting("memory", scope, ordinal) for ordinal in ordinals)}

    def limited(*devices: str) -> list[MpsSetting]:
        sizes = {DeviceUuid(device): 80 << 30 for device in devices}
        control = cast(Any, Settings({MEMORY: ""}))
        wanted = {"memory": "2048M"}
        return [change.setting for change in limit_changes(place({}, {}), control, ONE, subject(), wanted, sizes)]

    assert limited("GPU-0") == [MEMORY]
    assert limited("GPU-0", "GPU-1") == []


@pytest.mark.parametrize(
    ("now", "outcome", "after"),
    [
        ("40", UndoOutcome.RESTORED, "100"),
        ("100", UndoOutcome.RUNNING, "100"),
        ("70", UndoOutcome.FOREIGN, "70"),
    ],
)
def test_only_what_is_still_ours_is_put_back(now: str, outcome: UndoOutcome, after: str) -> None:
    control = Control({PERCENT: now})
    assert put_back(cast(Any, control), LimitChange(PERCENT, "100", "40", "100")) is outcome
    assert control.values[PERCENT] == after
    assert outcome.closed


def test_the_limits_of_a_server_that_ended_went_with_it() -> None:
    assert (
        put_back(cast(Any, Control()), LimitChange(MpsSetting("percentage", TWO), "100", "40", "100"))
        is UndoOutcome.GONE
    )


def test_a_default_is_put_back_on_the_servers_too_that_took_it_over() -> None:
    default = MpsSetting("percentage", Scope(""))
    control = Control({default: "40", PERCENT: "40"})
    put_back(cast(Any, control), LimitChange(default, "100", "40", "100"))
    assert set(control.values.values()) == {"100"}


names = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", max_size=64)
settings = st.builds(
    MpsSetting,
    st.sampled_from(["percentage", "memory", "priority"]),
    st.builds(Scope, names, names),
    st.none() | st.integers(0, 15),
)
values = st.sampled_from(["", "0", "1", "40", "37.5", "512M"])
changes = st.lists(st.builds(LimitChange, settings, values, values, values), max_size=18).map(tuple)


pipes = st.none() | st.tuples(st.integers(0, 2**32), st.integers(0, 2**64))


@given(changes, pipes)
def test_what_was_set_is_read_back_from_the_ledger_and_fits_in_a_line(
    written: tuple[LimitChange, ...], pipe: tuple[int, int] | None
) -> None:
    place_text = to_place(written, pipe)
    assert from_place(place_text) == (written, pipe)
    entry = LedgerEntry.of("mps", DAEMON.process, ContainerKey("x" * 100), 1, place_text)
    assert len(intend_line(entry)) <= MAX_LINE_BYTES


@pytest.mark.parametrize(
    "place_text",
    [
        "",
        "{}",
        '{"pipe":["a",7],"changes":[]}',
        '{"pipe":[7],"changes":[]}',
        "{}1",
        "[1]",
        '[["other","7","",null,"a","b","c"]]',
        '[["memory",7]]',
        "[[]]",
    ],
)
def test_a_ledger_entry_of_another_kind_is_no_limit(place_text: str) -> None:
    with pytest.raises(MpsError):
        from_place(place_text)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("/usr/bin/nvidia-cuda-mps-control -d", True),
        ("nvidia-cuda-mps-control --foreground", True),
        ("nvidia-cuda-mps-control -p 3 -d", True),
        ("nvidia-cuda-mps-control", False),
        ("nvidia-cuda-mps-control -p 3 server list --format=csv", False),
        ("nvidia-cuda-mps-server -d", False),
        ("", False),
    ],
)
def test_a_daemon_is_distinguished_from_a_program_that_gives_one_a_command(line: str, found: bool) -> None:
    assert is_daemon(line.split()) is found


@pytest.mark.parametrize(
    ("number", "unit", "text"), [(2, "G", "2048M"), (1, "", "1M"), (512, "M", "512M"), (0, "G", "")]
)
def test_limits_compare_in_mebibytes(number: int, unit: str, text: str) -> None:
    assert mebibytes(number, unit) == text
