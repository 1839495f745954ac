# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which lines gputop lists, in which order: trees, sorting, filters, search, a part of the devices; hostile names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import SetupError
from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    DeviceReading,
    DeviceUuid,
    EnforcementStatus,
    FunctionUsage,
    Process,
    ProcessId,
    ProcessUsage,
    Snapshot,
)
from agent.core.text import ASCII, UTF8, Glyphs, label, state
from agent.exporters.status_page.content import page as status_page
from agent.exporters.status_page.history import Ring
from agent.tui import cells as palette
from agent.tui.container_page import container_page
from agent.tui.history import ObservedChange, SnapshotHistory, observed_changes
from agent.tui.listing import BUSIEST, Line, Order, View, arranged, entries, found
from agent.tui.screen import Frame
from agent.tui.view import ListOptions, ListTable, narrowed
from tests.support.snapshots import GPU_0, GPU_1, container, rich_snapshot, usage

MIG_0, MIG_2 = (DeviceUuid(f"MIG-0000000{n}-aaaa-bbbb-cccc-dddddddddddd") for n in (0, 2))


def names(lines: list[Line]) -> list[str]:
    """Of the first line of each entry, indented as deep as it is."""
    return ["  " * (len(line.stem) - 1) + line.entry.names["name"] for line in lines if line.part == 0]


def few() -> Snapshot:
    """Without the one whose name tries to do harm."""
    snapshot = rich_snapshot()
    return replace(snapshot, containers=tuple(used for used in snapshot.containers if used.container.key != "c5"))


def test_the_tree_has_processes_under_containers_and_kernels_under_the_only_process() -> None:
    lines = names(arranged(entries(few(), View.CONTAINER, tree=True), BUSIEST))
    at = lines.index("trainer")
    assert lines[at : at + 5] == [
        "trainer",
        "  gemm",
        "  200 python train.py",
        "  201 python train.py",
        "  (graph without a name)",
    ]
    assert lines[lines.index("chat") + 1] == "  100 vllm serve"


def test_kernels_stand_below_a_process_that_is_alone() -> None:
    used = rich_snapshot().containers[1]
    alone = replace(rich_snapshot(), containers=(used,), processes=rich_snapshot().processes[1:2])
    lines = names(arranged(entries(alone, View.CONTAINER, tree=True), BUSIEST))
    assert lines[:3] == ["trainer", "  200 python train.py", "    gemm"]


def test_figures_begin_with_the_largest_and_names_with_a_unless_reversed() -> None:
    listed = entries(few(), View.CONTAINER)
    busiest = names(arranged(listed, BUSIEST))
    assert busiest == ["trainer", "chat", "twin", "twin", "host", "(unattributed)", "(unattributed)"]
    assert names(arranged(listed, Order("sm", True)))[:5] == ["twin", "twin", "chat", "trainer", "host"]
    assert names(arranged(listed, Order("name")))[:5] == ["chat", "host", "trainer", "twin", "twin"]
    assert names(arranged(listed, Order("name", True)))[:2] == ["twin", "twin"]
    assert names(arranged(listed, Order("memory")))[:2] == ["trainer", "chat"]
    assert names(arranged(listed, Order("state")))[0] == "trainer"


@pytest.mark.parametrize("view", list(View))
@pytest.mark.parametrize("reverse", [False, True])
def test_every_column_can_be_sorted_by_and_what_is_unattributed_stays_last(view: View, reverse: bool) -> None:
    snapshot = rich_snapshot()
    for column in ListTable.of(snapshot, ListOptions(view), 300, UTF8).columns:
        lines = arranged(entries(snapshot, view), Order(column.key, reverse))
        assert len(lines) == len(arranged(entries(snapshot, view), BUSIEST))
        assert lines[-1].entry.key[0] in ("rest", "gpu")


def test_the_column_beside_is_one_that_is_shown() -> None:
    shown = ListTable.of(few(), ListOptions(), 80, UTF8).columns
    look = ListOptions().sorted_beside(1, shown)
    assert look.order == Order("memory")
    assert look.sorted_beside(-1, shown).order == BUSIEST
    assert look.reversed().order == Order("memory", True)
    assert ListOptions(order=Order("gone")).sorted_beside(-1, shown).order.column == shown[-1].key


def test_a_view_keeps_the_order_that_it_shares_and_a_tree_begins_with_containers() -> None:
    look = ListOptions(order=Order("memory", True))
    assert look.of_view(View.GPU).order == look.order
    assert look.of_view(View.PROCESS).order == BUSIEST
    assert look.of_view(View.PROCESS).branched() == ListOptions(View.CONTAINER, tree=True)
    assert look.branched().tree
    assert not look.branched().branched().tree


def test_a_filter_keeps_what_matches_with_all_above_and_below_it() -> None:
    def kept(wanted: str, view: View = View.CONTAINER) -> list[str]:
        return names(arranged(entries(few(), view, tree=True), BUSIEST, wanted))

    rest = ["(unattributed)", "(unattributed)"]
    assert kept("GEMM") == ["trainer", "  gemm", *rest]
    assert kept("online") == ["chat", "  100 vllm serve", *rest]
    assert kept("train-0")[:2] == ["trainer", "  gemm"]
    assert kept("nothing of the kind") == rest
    assert kept("vllm", View.GPU)[:3] == ["GPU 0 NVIDIA H200", "  chat", "    100 vllm serve"]


def test_a_search_goes_round_in_a_circle() -> None:
    lines = arranged(entries(few(), View.CONTAINER), BUSIEST)
    first = found(lines, "TWIN", 0)
    assert first is not None
    second = found(lines, "twin", first + 1)
    assert second is not None
    assert second > first
    assert found(lines, "twin", second + 1) == first
    assert found(lines, "not there", 0) is None


def test_hidden_columns_are_not_shown() -> None:
    shown = ListTable.of(few(), ListOptions(hidden=frozenset({"sm", "state"})), 120, UTF8)
    assert {"sm", "state"}.isdisjoint(column.key for column in shown.columns)


def test_only_some_devices() -> None:
    snapshot = narrowed(rich_snapshot(), ["1"])
    assert [reading.device.uuid for reading in snapshot.devices] == [GPU_1]
    assert [used.container.name for used in snapshot.containers] == ["chat", "host"]
    assert all(one.device == GPU_1 for used in snapshot.containers for one in used.usage)
    assert narrowed(rich_snapshot(), [GPU_0[:12], "1"]).devices == rich_snapshot().devices[:2]
    with pytest.raises(SetupError, match="no such GPU; by index there are: 0, 1, 2"):
        narrowed(rich_snapshot(), ["7"])


def test_only_one_namespace() -> None:
    snapshot = narrowed(rich_snapshot(), namespace="batch")
    assert [used.container.name for used in snapshot.containers] == ["trainer"]
    assert {used.process.id.tgid for used in snapshot.processes} == {200, 201}
    assert list(snapshot.enforcement) == ["c2"]
    assert snapshot.devices == rich_snapshot().devices


@pytest.mark.parametrize(
    ("status", "enforcing", "expected"),
    [
        (EnforcementStatus("online"), True, None),
        (EnforcementStatus("offline", share_ratio=1.0, paused_ratio=0.0), True, "free"),
        (EnforcementStatus("offline", share_ratio=0.4, paused_ratio=0.0), True, "paced"),
        (EnforcementStatus("offline", share_ratio=1.0, paused_ratio=0.36), True, "paused 36%"),
        (EnforcementStatus("offline", share_ratio=0.4, rungs=("freeze", "swap")), True, "swapped"),
        (EnforcementStatus("offline", share_ratio=0.4, rungs=("freeze",)), False, "free"),
    ],
)
def test_the_state_is_one_word(status: EnforcementStatus, enforcing: bool, expected: str | None) -> None:
    assert state(status, enforcing) == expected


def page(snapshot: Snapshot, key: str, glyphs: Glyphs = UTF8, width: int = 120) -> list[str]:
    history = SnapshotHistory()
    history.add(snapshot)
    changes = [ObservedChange(snapshot.containers[0].container.name, (("why", "because"),))]
    return [line.plain for line in container_page(snapshot, ContainerKey(key), history, changes, (width, 40), glyphs)]


def test_the_page_of_a_container_that_works_unseen_says_so_and_where() -> None:
    assert any("unprobed on GPU 0: it works there by NVML" in line for line in page(rich_snapshot(), "c3"))
    assert not any("unprobed" in line for line in page(rich_snapshot(), "d4"))


def test_the_page_of_a_container_has_all_there_is_to_say() -> None:
    text = "\n".join(page(rich_snapshot(), "c2"))
    for part in ("trainer", "paused 35%: slack 75 %", "share 62.0%", "gemm", "plain", "25.0Gi", "because"):
        assert part in text
    assert "freeze could not be done: another writer has frozen it" in text
    assert "the promise is kept, slack +75%" in "\n".join(page(rich_snapshot(), "c1"))
    assert page(rich_snapshot(), "c9") == ["The container has gone."]


@pytest.mark.parametrize("width", range(1, 11))
@pytest.mark.parametrize("view", list(View))
def test_a_terminal_of_a_few_columns_is_drawn(width: int, view: View) -> None:
    listed = ListTable.of(rich_snapshot(), ListOptions(view, tree=True), width, UTF8)
    assert all(listed.drawn(index).plain for index in range(len(listed.lines)))
    history = SnapshotHistory()
    history.add(rich_snapshot())
    assert all(len(line) <= width for line in page(rich_snapshot(), "c1", width=width))
    assert all(line.cell_len <= width for line in Frame(width, 10, UTF8).head(rich_snapshot(), history))


def split() -> Snapshot:
    """The second GPU has two MIG instances, one of which only the trainer uses."""
    snapshot = rich_snapshot()
    gpu = snapshot.devices[1].device
    slices = [
        replace(gpu, uuid=uuid, name="NVIDIA H200 MIG 3g.71gb", parent=gpu.uuid, mig_profile="3g.71gb", mig_index=index)
        for index, uuid in ((0, MIG_0), (2, MIG_2))
    ]
    readings = [DeviceReading(device, sm_activity_ratio=0.5, sm_activity_source="gpm") for device in slices]
    chat, trainer, *others = snapshot.containers
    trainer = replace(trainer, usage=(usage(MIG_2, 0.5, 1),))
    member = replace(snapshot.processes[1], usage=(usage(MIG_2, 0.5, 1),))
    return replace(
        snapshot,
        devices=(*snapshot.devices[:2], *readings, snapshot.devices[2]),
        containers=(chat, trainer, *others),
        processes=(member, *snapshot.processes[2:]),
    )


def test_mig_instances_are_distinguished_wherever_a_device_is_named() -> None:
    def cells(view: View, first: str) -> list[str]:
        listed = ListTable.of(split(), ListOptions(view), 200, UTF8)
        drawn = [listed.drawn(index).plain for index in range(len(listed.lines))]
        return next(line for line in drawn if line.lstrip().startswith(first)).split()

    assert "1:2" in cells(View.CONTAINER, "trainer")
    assert "1:2" in cells(View.PROCESS, "200")
    assert cells(View.GPU, "GPU 1:2")[:3] == ["GPU", "1:2", "NVIDIA"]
    heads = [line.plain for line in Frame(120, 40, UTF8).head(split(), SnapshotHistory())]
    assert [line.split()[1] for line in heads if line.startswith("GPU ") and "Warden" not in line] == [
        "0",
        "1",
        "1:0",
        "1:2",
        "2",
    ]
    tables = status_page(split(), Ring(), (), "node", 0).tables
    assert [row[0].text for row in tables[0].rows] == ["0", "1", "1:0", "1:2", "2"]
    assert [row[3].text for row in tables[2].rows if row[0].text == "batch/train-0/trainer"] == ["1:2"]


def test_only_a_mig_instance_or_a_gpu_with_all_of_them() -> None:
    assert [label(reading.device) for reading in narrowed(split(), ["1:2"]).devices] == ["1:2"]
    assert [used.container.name for used in narrowed(split(), ["1:2"]).containers] == ["trainer"]
    assert [label(reading.device) for reading in narrowed(split(), ["1"]).devices] == ["1", "1:0", "1:2"]
    with pytest.raises(SetupError, match="by index there are: 0, 1, 1:0, 1:2, 2"):
        narrowed(split(), ["1:1"])


def test_devices_are_sorted_by_as_they_are_listed() -> None:
    (trainer,) = (entry for entry in entries(split(), View.CONTAINER) if entry.container == "c2")
    assert trainer.index == 3


def test_decisions_are_seen_where_reason_or_rungs_change() -> None:
    history, snapshot = SnapshotHistory(), rich_snapshot()
    key = ContainerKey("c2")
    status = snapshot.enforcement[key]
    for second, reason in enumerate(("a", "a", "b")):
        now = {key: replace(status, reason=reason)}
        history.add(replace(snapshot, at_ns=second * 1_000_000_000, enforcement=now))
    assert [one.head.partition("  ")[2] for one in observed_changes(history, key)] == ["share 62%: b", "share 62%: a"]
    assert observed_changes(history, key)[0].rows == (
        ("by", "mps"),
        ("but", "freeze: another writer has frozen it: left alone"),
    )


def hostile(name: str) -> Snapshot:
    """One of everything that can have a name, with that name."""
    owner = Container(ContainerKey("x"), name, name, pod=name, namespace=name, image=name)
    process = ProcessUsage(Process(ProcessId(7, 7), name, name, owner.key), (usage(GPU_0, 0.5, 1),))
    kernel = FunctionUsage(name, GPU_0, 1.0, 0.1, 0.001)
    status = EnforcementStatus("offline", name, reason=name, troubles={name: name}, share_ratio=0.5)
    used = ContainerUsage(
        owner, (replace(usage(GPU_0, 0.5, 1), memory_by_kind={name: 1}),), (process.process.id,), (kernel,)
    )
    return replace(
        rich_snapshot(),
        containers=(used,),
        processes=(process,),
        enforcement={owner.key: status, container("y", "y").key: status},
    )


@given(st.text(st.characters(), max_size=30), st.sampled_from([UTF8, ASCII]), st.sampled_from(list(View)))
def test_no_name_moves_a_cursor_or_colours_a_screen(name: str, glyphs: Glyphs, view: View) -> None:
    snapshot = hostile("\x1b[2J\x1b]0;x\x07" + name)
    listed = ListTable.of(snapshot, ListOptions(view, tree=True), 160, glyphs)
    lines = [listed.drawn(index).plain for index in range(len(listed.lines))]
    lines += page(snapshot, "x", glyphs)
    frame = Frame(160, 40, glyphs, failure=name)
    lines += [line.plain for line in frame.head(snapshot, SnapshotHistory())]
    lines += [line.plain for line in frame.foot(snapshot, listed.lines[0], [name])]
    assert all(line.isprintable() for line in lines)
    assert glyphs is UTF8 or all(line.isascii() for line in lines)


def test_light_terminals_are_known_by_what_they_say() -> None:
    assert palette.is_light({"COLORFGBG": "0;15"})
    assert palette.is_light({"COLORFGBG": "0;default;7"})
    assert not palette.is_light({"COLORFGBG": "15;0"})
    assert not palette.is_light({})
