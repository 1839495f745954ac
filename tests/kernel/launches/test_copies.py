# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Offline copies wait at their calls for online ones and for other containers', and nothing else does."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core.clock import monotonic_ns
from agent.node.procfs import Procfs
from agent.probes.abi import (
    LINK_LEAD_NS,
    LINK_QUEUE_NS,
    LINK_SETTLE_NS,
    LINKS,
    MOST_COPIERS,
    ORDINALS,
    PAUSE_COPY,
    PAUSE_LINK_FREE,
    ROLE_OFFLINE,
    ROLE_ONLINE,
    RULE_COPIES,
    RULE_SHORT,
    WEIGHT_ONE,
    Copier,
    Link,
    Pause,
    ProcessKey,
    Rule,
    Wake,
)
from agent.probes.libbpf import RingBuffer
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, lost
from tools.harness.wait import until

GB = 1_000_000_000  # per second: a byte takes a nanosecond
SLOW = GB // 500  # 10 ms for 20 kB: the calls themselves take less
MS = 1_000_000
FOR_EVER = 1 << 62
ALLOC = "alloc:67108864"
TO_DEVICE, TO_HOST = 0, 1  # links of the first slot


@pytest.fixture
def links(own_probes: LibcudaProbes) -> Iterator[list[Link]]:
    """Of 1 GB/s, unused."""
    shared = list(own_probes.map("links").share(LINKS))
    for link in shared:
        ctypes.memset(ctypes.addressof(link), 0, ctypes.sizeof(link))
        link.bytes_per_second = GB
    own_probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER
    yield shared
    own_probes.map("controls").share(1)[0].lease_until_ns = 0


def put_rule(
    probes: LibcudaProbes, driven: Driven, *, role: int = ROLE_OFFLINE, flags: int = 0, weight: float = 1.0
) -> ProcessKey:
    key = ProcessKey.of(driven.process)
    weight_milli = round(weight * WEIGHT_ONE)
    rule = Rule(role=role, flags=RULE_COPIES | flags, max_pause_ns=FOR_EVER, group=7, weight=weight_milli)
    rule.slots[:] = [0] * ORDINALS
    rule.slot_unknown = 0
    probes.map("rules").put(key, rule)
    return key


def is_done(driven: Driven) -> bool:
    return bool(select.select([driven.stdout], [], [], 0)[0])


def is_stopped(driven: Driven) -> bool:
    return Procfs().stat(driven.process.tgid).state == "T"


def take_stops(probes: LibcudaProbes, driven: Driven) -> list[Pause]:
    """Resumes the process as the guardian does, until it is done; what it was stopped for."""
    taken = []
    while not is_done(driven):
        if is_stopped(driven):
            stop = probes.map("stops").take(ProcessKey.of(driven.process))
            assert stop is not None
            taken.append(stop)
            os.kill(driven.process.tgid, signal.SIGCONT)
    driven.finish()
    return taken


def stops_of(
    driver: Driver, probes: LibcudaProbes, *operations: str, flags: int = 0, weight: float = 1.0
) -> list[Pause]:
    with driver.start(ALLOC, *operations) as driven:
        put_rule(probes, driven, flags=flags, weight=weight)
        driven.begin()
        return take_stops(probes, driven)


@pytest.mark.parametrize("copy", ["copy_htod", "copy_htod_async", "copy_unified", "copy_unified_async"])
def test_an_offline_copy_is_stopped_while_an_online_one_is_under_way(
    copy: str, driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].online_until_ns = FOR_EVER
    (stop,) = stops_of(driver, own_probes, f"{copy}:4096")
    assert (stop.reason, stop.link, stop.slot, stop.estimate_ns) == (PAUSE_COPY, TO_DEVICE, 0, 4096)


def test_an_online_copy_in_the_other_direction_stops_nothing(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].online_until_ns = FOR_EVER
    assert not stops_of(driver, own_probes, "copy_dtoh:4096", "copy_dtod:4096", "set8:4096")
    links[TO_HOST].online_until_ns = FOR_EVER
    assert [stop.link for stop in stops_of(driver, own_probes, "copy_dtoh:4096")] == [TO_HOST]


def test_an_online_process_is_never_stopped_at_a_copy(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].online_until_ns = links[TO_HOST].online_until_ns = FOR_EVER
    with driver.start(ALLOC, "5*copy_htod:4096", "5*copy_dtoh_async:4096") as driven:
        key = put_rule(own_probes, driven, role=ROLE_ONLINE)
        driven.begin()
        driven.finish()
    assert own_probes.map("paces").get(key) is None
    assert own_probes.map("stops").get(key) is None


def test_without_a_lease_nothing_is_stopped(driver: Driver, own_probes: LibcudaProbes, links: list[Link]) -> None:
    links[TO_DEVICE].online_until_ns = FOR_EVER
    own_probes.map("controls").share(1)[0].lease_until_ns = 0
    assert not stops_of(driver, own_probes, "10*copy_htod:4096")


def test_where_the_speed_of_the_link_is_not_known_nothing_is_stopped(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].online_until_ns = FOR_EVER
    links[TO_DEVICE].bytes_per_second = 0
    assert not stops_of(driver, own_probes, "10*copy_htod:4096")


def online(driver: Driver, probes: LibcudaProbes, *operations: str) -> None:
    with driver.start(ALLOC, *operations) as driven:
        put_rule(probes, driven, role=ROLE_ONLINE)
        driven.begin()
        driven.finish()


def test_asynchronous_online_copies_are_under_way_for_as_long_as_their_bytes_take_one_after_another(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].bytes_per_second = SLOW
    online(driver, own_probes, "3*copy_htod_async:20000")
    link = links[TO_DEVICE]
    first_ns = link.online_until_ns - 30 * MS
    assert 0 <= link.online_at_ns - first_ns < 20 * MS
    assert links[TO_HOST].online_until_ns == 0


@pytest.mark.parametrize("wait", ["sync", "sync_stream", "sync_event"])
def test_online_copies_are_over_when_a_wait_for_them_has_returned(
    wait: str, driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].bytes_per_second = SLOW
    links[TO_DEVICE].waiting = 1
    begun_ns = monotonic_ns()
    online(driver, own_probes, "copy_htod_async:60000", wait)
    assert begun_ns < links[TO_DEVICE].online_until_ns <= monotonic_ns()
    assert [(wake.kind, wake.slot) for wake in wakes(own_probes)] == [(PAUSE_LINK_FREE, TO_DEVICE)]
    assert links[TO_DEVICE].free_posted == 1


def wakes(probes: LibcudaProbes) -> list[Wake]:
    """What waits in the ring for the guardian, of links."""
    found: list[Wake] = []
    ring = RingBuffer(
        probes.bpf.lib, probes.bpf.map_fd("pauses"), lambda data: found.append(Wake.from_buffer_copy(data))
    )
    ring.consume()
    ring.close()
    return [wake for wake in found if wake.kind == PAUSE_LINK_FREE]


def test_a_blocking_online_copy_is_over_when_it_has_returned(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_HOST].bytes_per_second = SLOW
    online(driver, own_probes, "copy_dtoh:60000")
    assert links[TO_HOST].online_at_ns < links[TO_HOST].online_until_ns <= monotonic_ns()


def test_a_wait_does_not_end_the_copies_of_another_online_process(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].bytes_per_second = SLOW
    online(driver, own_probes, "copy_htod_async:90000")
    online(driver, own_probes, "copy_htod_async:1000", "sync")
    assert links[TO_DEVICE].online_process.tgid == 0
    assert links[TO_DEVICE].online_until_ns > links[TO_DEVICE].online_at_ns


def modelled(copies: list[int], weight: int, least_ns: int) -> tuple[int, list[int]]:
    """Virtual time of a container after these copies, and which of them wait; another has had `least_ns`."""
    virtual_ns, waiting = 0, []
    for number, copied in enumerate(copies):
        if virtual_ns > least_ns + LINK_LEAD_NS * WEIGHT_ONE // weight:
            waiting.append(number)
        virtual_ns += copied * WEIGHT_ONE // weight
    return virtual_ns, waiting


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    copies=st.lists(st.integers(1, 8 * MS), min_size=1, max_size=12),
    weight=st.sampled_from([1, 250, 1000, 2000, 4000, 1_000_000]),
    least_ns=st.integers(0, 20 * MS),
)
def test_a_container_waits_where_it_is_ahead_of_the_one_that_has_had_least(
    copies: list[int], weight: int, least_ns: int, driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    link = links[TO_DEVICE]
    link.virtual_ns = link.queued_until_ns = 0
    link.copiers[:] = [Copier()] * MOST_COPIERS
    link.copiers[3] = Copier(group=9, weight=WEIGHT_ONE, virtual_ns=least_ns, until_ns=FOR_EVER)
    operations = [f"copy_htod_async:{copied}" for copied in copies]
    stops = stops_of(driver, own_probes, *operations, weight=weight / WEIGHT_ONE)
    virtual_ns, waiting = modelled(copies, weight, least_ns)
    assert [stop.estimate_ns for stop in stops] == [copies[number] for number in waiting]
    (own,) = [one for one in link.copiers if one.group == 7]
    assert own.virtual_ns == virtual_ns
    assert link.virtual_ns <= min(least_ns, virtual_ns)


def test_a_container_alone_is_never_ahead(driver: Driver, own_probes: LibcudaProbes, links: list[Link]) -> None:
    links[TO_DEVICE].copiers[3] = Copier(group=9, weight=WEIGHT_ONE, virtual_ns=0, until_ns=1)  # has ended
    assert not stops_of(driver, own_probes, "20*copy_htod:8000000")


def test_one_that_begins_again_has_saved_no_more_than_the_others_may_be_ahead(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    link = links[TO_DEVICE]
    link.virtual_ns = 1_000 * MS
    link.copiers[2] = Copier(group=7, weight=WEIGHT_ONE, virtual_ns=5, until_ns=5)
    stops_of(driver, own_probes, "copy_htod:4096")
    assert link.copiers[2].virtual_ns == 1_000 * MS - LINK_LEAD_NS + 4096


def test_beside_an_online_container_few_copies_are_under_way_at_once(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].bytes_per_second = SLOW
    thousand = f"copy_htod_async:{LINK_QUEUE_NS // 500}"
    assert not stops_of(driver, own_probes, *[thousand] * 4)
    links[TO_DEVICE].copiers[0].settled = 1
    links[TO_DEVICE].queued_until_ns = monotonic_ns() + 1000 * MS
    stops = stops_of(driver, own_probes, *[thousand] * 4, flags=RULE_SHORT)
    assert len(stops) == 4
    ahead_ns = links[TO_DEVICE].queued_until_ns - monotonic_ns()
    assert ahead_ns < 1000 * MS  # those that were stopped are not under way


def test_what_a_container_had_under_way_before_gets_time_to_end_once(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    with driver.start(ALLOC, "copy_htod_async:1", "idle:1000", "copy_htod_async:1") as driven:
        put_rule(own_probes, driven, flags=RULE_SHORT)
        begun_ns = monotonic_ns()
        driven.begin()
        stops = take_stops(own_probes, driven)
    assert len(stops) == 1
    assert links[TO_DEVICE].queued_until_ns >= begun_ns + LINK_SETTLE_NS
    assert not stops_of(driver, own_probes, "copy_htod_async:1")
    assert links[TO_DEVICE].copiers[0].settled == 0  # it is no more beside an online container


def test_what_finds_no_place_on_a_link_is_counted_and_runs(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    for number in range(MOST_COPIERS):
        links[TO_DEVICE].copiers[number] = Copier(group=100 + number, weight=WEIGHT_ONE, until_ns=FOR_EVER)
    links[TO_DEVICE].online_until_ns = FOR_EVER
    before = lost(own_probes).get("pace", 0)
    assert not stops_of(driver, own_probes, "3*copy_htod:4096")
    assert lost(own_probes)["pace"] == before + 3


def test_a_process_that_another_writer_resumes_at_a_copy_runs_for_a_while_and_that_is_counted(
    driver: Driver, own_probes: LibcudaProbes, links: list[Link]
) -> None:
    links[TO_DEVICE].online_until_ns = FOR_EVER
    with driver.start(ALLOC, "50*copy_htod:4096") as driven:
        key = put_rule(own_probes, driven)
        driven.begin()
        until(lambda: is_stopped(driven), "it to be stopped")
        os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()
        pace = own_probes.map("paces").get(key)
    assert pace is not None
    assert (pace.copy_pauses, pace.pauses, pace.foreign) == (1, 1, 1)
