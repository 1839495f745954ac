# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Limits keep every reserve whatever is allocated within them; acts are the fewest, on offline containers, and late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ContainerKey, DeviceUuid, ProcessId
from enforce.memory.accounts import DeviceMemory, MemoryClaim, MemoryTenant, MemoryView, Overhead
from enforce.memory.planner import (
    EASE,
    EVICT,
    LASTING_NS,
    RESTORE_NS,
    SHUN_NS,
    SWAP,
    MemoryPlanState,
    Plan,
    plan,
    victims,
)

GIB, SECOND_NS = 1 << 30, 1_000_000_000
GPU, OTHER = DeviceUuid("GPU-0"), DeviceUuid("GPU-1")
TRAINING = ContainerKey("training")
CHAT = ContainerKey("chat")
BYTES = st.integers(0, 80) | st.integers(0, 80 * GIB)


def tenant(
    name: str = "training",
    nvml: int | None = 10 * GIB,
    live: int | None = None,
    quota: int | None = None,
    **more: object,
) -> MemoryTenant:
    holding = DeviceMemory(nvml, live if live is not None else nvml or 0)
    made = MemoryTenant(ContainerKey(name), quota, 1.0, 100, {GPU: holding}, (SWAP, EVICT), 30 * SECOND_NS)
    made = replace(made, processes=frozenset({ProcessId(7, 100)}))
    return replace(made, **more)  # type: ignore[arg-type]


def view(
    *tenants: MemoryTenant, free: int | None = 10 * GIB, reserve: int = 0, held: int = 0, at: int = 1
) -> MemoryView:
    claims = (MemoryClaim("chat", reserve, CHAT, {GPU: held}),) if reserve else ()
    return MemoryView(at, {GPU: free}, claims, tenants)


def run(state: MemoryPlanState, seen: MemoryView, seconds: float) -> tuple[MemoryPlanState, Plan]:
    return plan(state, replace(seen, at_ns=int(seconds * SECOND_NS)), int(seconds * SECOND_NS))


def lasting(seen: MemoryView, seconds: int = 4, state: MemoryPlanState | None = None) -> tuple[MemoryPlanState, Plan]:
    """The same picture for a while."""
    state, planned = run(state or MemoryPlanState(), seen, 0)
    for second in range(1, seconds + 1):
        state, planned = run(state, seen, second)
    return state, planned


@st.composite
def tenants(draw: st.DrawFn) -> tuple[MemoryTenant, ...]:
    made = []
    for number in range(draw(st.integers(0, 5))):
        live, overhead = draw(BYTES), draw(BYTES)
        nvml = draw(st.none() | st.just(live + overhead))
        made.append(
            tenant(
                f"t{number}",
                nvml,
                live,
                draw(st.none() | BYTES),
                weight=draw(st.sampled_from((0.5, 1.0, 2.0))),
                started_ticks=draw(st.integers(0, 3)),
                rungs=draw(st.sampled_from(((), (SWAP,), (EVICT,), (SWAP, EVICT)))),
            )
        )
    return tuple(made)


@given(tenants(), BYTES, BYTES, BYTES)
def test_whatever_is_allocated_within_the_limits_the_online_room_stays(
    them: tuple[MemoryTenant, ...], free: int, reserve: int, held: int
) -> None:
    seen = view(*them, free=free, reserve=reserve, held=held)
    _, planned = run(MemoryPlanState(), seen, 1)
    live = sum(one.on(GPU).live_bytes for one in them)
    if reserve:
        taken = max(0, planned.limits[None, GPU] - live)  # by all of them, at most
        assert free - taken >= min(free, seen.needed(GPU))
        assert taken == 0 or held + free - taken >= reserve
    else:
        assert (None, GPU) not in planned.limits


@given(tenants())
def test_a_container_within_its_limit_is_within_its_quota_contexts_included(them: tuple[MemoryTenant, ...]) -> None:
    _, planned = run(MemoryPlanState(), view(*them), 1)
    for one in them:
        if one.quota_bytes is None:
            assert (one.container, GPU) not in planned.limits
            continue
        nvml, live = one.on(GPU).nvml_bytes, one.on(GPU).live_bytes
        overhead = nvml - live if nvml is not None else 0
        assert planned.limits[one.container, GPU] == max(0, one.quota_bytes - overhead)


@given(tenants(), BYTES, BYTES, st.integers(1, 12))
def test_only_offline_containers_are_acted_on_and_only_by_what_their_ladder_can_do(
    them: tuple[MemoryTenant, ...], free: int, reserve: int, seconds: int
) -> None:
    state = MemoryPlanState()
    for second in range(seconds):
        state, planned = run(state, view(*them, free=free, reserve=reserve), second)
        for container, act in planned.acts.items():
            one = next(one for one in them if one.container == container)
            assert act.rung in one.rungs
        if second * SECOND_NS < LASTING_NS:
            assert not planned.acts  # a lack that does not last is no reason to act


@given(tenants(), BYTES)
def test_of_the_victims_none_is_superfluous_and_together_they_suffice_if_any_do(
    them: tuple[MemoryTenant, ...], lack: int
) -> None:
    chosen = victims(them, GPU, lack)
    total = sum(one.on(GPU).bytes for one in chosen)
    everything = sum(one.on(GPU).bytes for one in them)
    assert total >= min(lack, everything)
    for one in chosen:
        assert total - one.on(GPU).bytes < lack


def test_the_lightest_goes_first_then_the_youngest_then_the_biggest() -> None:
    light = tenant("light", weight=0.5, started_ticks=1)
    young, old = tenant("young", started_ticks=200), tenant("old", started_ticks=100)
    big = tenant("big", 20 * GIB, started_ticks=100)
    for lack, names in ((GIB, ["light"]), (11 * GIB, ["light", "young"]), (21 * GIB, ["light", "big"])):
        assert [one.container for one in victims((old, big, young, light), GPU, lack)] == names


def test_room_that_lacks_for_a_while_is_made_by_the_mildest_rung_that_can_be_climbed() -> None:
    _, planned = lasting(view(tenant(), free=GIB, reserve=5 * GIB))
    assert {key: act.rung for key, act in planned.acts.items()} == {"training": SWAP}
    _, planned = lasting(view(tenant(rungs=(EVICT,)), free=GIB, reserve=5 * GIB))
    assert planned.acts[ContainerKey("training")].rung == EVICT
    _, planned = lasting(view(tenant(rungs=()), free=GIB, reserve=5 * GIB))
    assert not planned.acts


def test_room_that_an_online_container_already_has_is_not_kept_a_second_time() -> None:
    _, planned = lasting(view(tenant(), free=0, reserve=5 * GIB, held=5 * GIB))
    assert not planned.acts
    assert planned.limits[None, GPU] == 10 * GIB  # what is there may stay, no more may come


def test_before_its_container_runs_a_reserve_is_kept_on_every_device() -> None:
    other = DeviceUuid("GPU-1")
    seen = MemoryView(1, {GPU: 10 * GIB, other: GIB}, (MemoryClaim("chat", 4 * GIB, None, {}),), (tenant(),))
    assert (seen.room(GPU), seen.room(other)) == (6 * GIB, -3 * GIB)


def test_what_was_swapped_out_comes_back_once_there_has_been_room_for_a_while_and_not_before() -> None:
    short = view(tenant(), free=GIB, reserve=5 * GIB)
    state, planned = lasting(short)
    gone = view(tenant(nvml=0), free=11 * GIB, reserve=5 * GIB)
    for second in range(5, 20):
        state, planned = run(state, gone, second)
        assert planned.acts[ContainerKey("training")].rung == SWAP  # 6 GiB are no room for its 10
    room = view(tenant(nvml=0), free=5 * GIB + int(10 * GIB * EASE) + 1, reserve=5 * GIB)
    state, planned = run(state, room, 20)
    assert planned.acts
    state, planned = run(state, gone, 21)  # it went again: the time restarts
    state, planned = run(state, room, 22)
    state, planned = run(state, room, 22 + RESTORE_NS / SECOND_NS - 1)
    assert planned.acts
    state, planned = run(state, room, 22 + RESTORE_NS / SECOND_NS)
    assert not planned.acts


def test_while_one_is_on_its_way_out_no_other_is_chosen() -> None:
    both = view(tenant("a"), tenant("b"), free=GIB, reserve=5 * GIB)
    state, planned = lasting(both)
    assert set(planned.acts) == {"a"}
    state, planned = run(state, both, 5)
    assert set(planned.acts) == {"a"}


def test_a_container_over_its_quota_is_evicted_but_not_swapped_out_for_that() -> None:
    over = tenant(nvml=10 * GIB, quota=8 * GIB)
    _, planned = lasting(view(over))
    assert planned.acts[over.container].rung == EVICT
    _, planned = lasting(view(replace(over, rungs=(SWAP,))))
    assert not planned.acts


def test_an_allocation_that_waited_as_long_as_it_may_leads_to_an_eviction() -> None:
    waiting = tenant(waiting_since_ns=0, max_hold_ns=2 * SECOND_NS)
    _, planned = lasting(view(waiting), seconds=1)
    assert not planned.acts
    _, planned = lasting(view(waiting), seconds=2)
    assert planned.acts[waiting.container].rung == EVICT


def test_what_is_stopped_at_an_allocation_is_not_asked_to_swap_itself_out() -> None:
    waiting = tenant(waiting_since_ns=0, max_hold_ns=60 * SECOND_NS)
    _, planned = lasting(view(waiting, free=GIB, reserve=5 * GIB))
    assert planned.acts[waiting.container].rung == EVICT


def test_where_nothing_is_known_of_a_device_nothing_is_limited_for_its_sake() -> None:
    _, planned = lasting(view(tenant(), free=None, reserve=5 * GIB))
    assert (None, GPU) not in planned.limits
    assert not planned.acts


def test_overhead_is_the_least_of_the_last_ticks_and_of_pools_the_least_ever() -> None:
    overhead = Overhead()
    for extra in (3, 1, 5):
        overhead = overhead.after(DeviceMemory(100 + extra, 100))
    assert overhead.bytes == 1
    for _ in range(3):
        overhead = overhead.after(DeviceMemory(104, 100))
    assert overhead.bytes == 4
    pooled: Mapping[bool, int] = {True: 2, False: 60}
    for has_pool, expected in pooled.items():
        overhead = Overhead().after(DeviceMemory(102, 100, has_pool))
        for _ in range(5):
            overhead = overhead.after(DeviceMemory(160, 100, has_pool))
        assert overhead.bytes == expected


def test_a_swap_that_fails_becomes_an_eviction_while_room_still_lacks() -> None:
    short = view(tenant(), free=GIB, reserve=5 * GIB)
    state, planned = lasting(short)
    assert planned.acts[TRAINING].rung == SWAP
    failed = view(tenant(rungs=(EVICT,)), free=GIB, reserve=5 * GIB)
    _, planned = run(state, failed, 4.1)
    act = planned.acts[TRAINING]
    assert act.rung == EVICT
    assert act.reason.endswith("; it could not be swapped out")
    _, planned = run(state, replace(failed, free_bytes={GPU: 6 * GIB}), 4.1)
    assert not planned.acts


def test_where_nothing_but_a_swap_is_allowed_a_failed_one_is_tried_again_only_after_a_while() -> None:
    short = view(tenant(rungs=(SWAP,)), free=GIB, reserve=5 * GIB)
    state, _ = lasting(short)
    state, planned = run(state, view(tenant(rungs=()), free=GIB, reserve=5 * GIB), 4.1)
    assert not planned.acts
    for second in range(5, 4 + SHUN_NS // SECOND_NS):
        state, planned = run(state, short, second)  # only the planner remembers the failure
        assert not planned.acts
    for second in range(4 + SHUN_NS // SECOND_NS, 9 + SHUN_NS // SECOND_NS):
        state, planned = run(state, short, second)
    assert planned.acts[TRAINING].rung == SWAP


def test_in_place_of_what_cannot_be_swapped_out_another_is() -> None:
    state, planned = lasting(view(tenant("a", rungs=(SWAP,)), tenant("b"), free=GIB, reserve=5 * GIB))
    assert set(planned.acts) == {"a"}
    _, planned = run(state, view(tenant("a", rungs=()), tenant("b"), free=GIB, reserve=5 * GIB), 4.1)
    assert {key: act.rung for key, act in planned.acts.items()} == {"b": SWAP}


def test_an_eviction_ends_with_the_processes_that_it_was_about() -> None:
    old, new = ProcessId(7, 100), ProcessId(8, 900)
    over = tenant(nvml=10 * GIB, quota=8 * GIB, processes=frozenset({old}))
    state, planned = lasting(view(over))
    assert planned.acts[TRAINING].rung == EVICT
    state, planned = run(state, view(replace(over, processes=frozenset({old, new}))), 5)
    assert planned.acts[TRAINING].rung == EVICT  # not all of it is gone
    restarted = replace(over, processes=frozenset({new}))
    state, planned = run(state, view(restarted), 6)  # NVML's figure is the old one's still
    assert not planned.acts
    for second in range(7, 20):
        state, planned = run(state, view(replace(restarted, holdings={GPU: DeviceMemory(GIB, GIB)})), second)
        assert not planned.acts
    _, planned = lasting(view(restarted), state=state)
    assert planned.acts[TRAINING].processes == {new}  # it did it again


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4), BYTES, BYTES)
def test_what_comes_back_together_fits_together_on_every_device(
    sizes: list[tuple[int, int]], room: int, other_room: int
) -> None:
    them = [
        tenant(f"t{number}", rungs=(SWAP,), holdings={GPU: DeviceMemory(a * GIB, 0), OTHER: DeviceMemory(b * GIB, 0)})
        for number, (a, b) in enumerate(sizes)
    ]

    def seen(free: int, other: int, held: list[MemoryTenant]) -> MemoryView:
        claim = MemoryClaim("chat", 200 * GIB, CHAT, {GPU: 0, OTHER: 0})
        return MemoryView(1, {GPU: 200 * GIB + free, OTHER: 200 * GIB + other}, (claim,), tuple(held))

    state, before = lasting(seen(-190 * GIB, -190 * GIB, them))
    gone = [replace(one, holdings={GPU: DeviceMemory(0, 0), OTHER: DeviceMemory(0, 0)}) for one in them]
    after = before
    for second in range(5, 12):
        state, after = run(state, seen(room, other_room, gone), second)
    back = [act for key, act in before.acts.items() if key not in after.acts]
    for device, free in ((GPU, room), (OTHER, other_room)):
        assert sum(act.held_bytes.get(device, 0) for act in back) <= free
    if len(before.acts) == 1 and not back:  # nor is any container kept out without a reason
        (act,) = before.acts.values()
        frees = {GPU: room, OTHER: other_room}
        assert any(held * EASE > frees[device] for device, held in act.held_bytes.items())


def test_what_is_only_planned_counts_as_done_so_that_no_other_is_named_for_the_same_lack() -> None:
    both = replace(view(tenant("a"), tenant("b"), free=GIB, reserve=5 * GIB), acting=False)
    state, planned = lasting(both, seconds=30)
    assert {key: act.rung for key, act in planned.acts.items()} == {"a": SWAP}
    for second in range(31, 40):
        state, planned = run(state, replace(both, free_bytes={GPU: 6 * GIB}), second)
    assert not planned.acts  # there is room for it, where it is


def test_one_that_holds_memory_on_two_devices_counts_on_both() -> None:
    wide = tenant("a", holdings={GPU: DeviceMemory(10 * GIB, 0), OTHER: DeviceMemory(10 * GIB, 0)})
    beside = tenant("b", holdings={OTHER: DeviceMemory(10 * GIB, 0)})
    claim = MemoryClaim("chat", 5 * GIB, CHAT, {GPU: 0, OTHER: 0})
    seen = MemoryView(1, {GPU: GIB, OTHER: GIB}, (claim,), (wide, beside))
    _, planned = lasting(seen)
    assert set(planned.acts) == {"a"}
