# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What runs, what is captured and what a wait drains follow the streams that calls name, and the events between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.core.model import ProcessId
from agent.probes.abi import ProcessKey
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver, compile_driver, copied, kernels, latencies

KERNEL_NS = 5_000_000
NON_BLOCKING = 1
TWO = (f"stream:1:{NON_BLOCKING}", f"stream:2:{NON_BLOCKING}")


@pytest.fixture(scope="session")
def streams(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Starts streams.c."""
    return replace(driver, program=compile_driver(tmp_path_factory.mktemp("streams"), "streams"))


def deliveries(probes: LibcudaProbes, process: ProcessId) -> list[int]:
    """Launches of each stretch between two drained waits."""
    found = probes.map("delivered").get(ProcessKey.of(process))
    return [found.ring[n].launches for n in range(found.count)] if found else []


@pytest.mark.parametrize(
    ("operations", "ran", "bytes_copied"),
    [
        ((*TWO, "begin:1", "launch:2:0", "copy:2:100", "end:1"), 1, 100),
        ((*TWO, "begin:1", "launch:1:0", "copy:1:100", "end:1"), 0, 0),
        ((*TWO, "begin:1", "launch:1:0", "copy:1:100", "end:1", "replay:1"), 1, 100),
        ((*TWO, "begin:1", "launch:1:0", "end:1", "launch:1:0"), 1, 0),
        # another stream joins by an event of the capture, and comes back
        (
            (*TWO, "begin:1", "record:1:1", "join:2:1", "launch:2:0", "copy:2:100", "record:2:2", "join:1:2", "end:1"),
            0,
            0,
        ),
        (
            (*TWO, "begin:1", "record:1:1", "join:2:1", "launch:2:0", "record:2:2", "join:1:2", "end:1", "replay:2"),
            1,
            0,
        ),
        # it has left when the capture is over
        (
            (*TWO, "begin:1", "record:1:1", "join:2:1", "record:2:2", "join:1:2", "end:1", "launch:2:0"),
            1,
            0,
        ),
        # an event from outside joins nothing
        ((*TWO, "record:1:2", "begin:1", "join:2:1", "launch:2:0", "end:1"), 1, 0),
        # a stream of the same address as one that was destroyed while it was captured
        ((TWO[0], "begin:1", "destroy:1", "stream:1:1", "launch:1:0"), 1, 0),
    ],
)
def test_what_becomes_part_of_a_graph_is_what_its_streams_are_given(
    streams: Driver, own_probes: LibcudaProbes, operations: tuple[str, ...], ran: int, bytes_copied: int
) -> None:
    process = streams.run(*operations, "context").process
    assert kernels(own_probes, process) == ran
    assert copied(own_probes, process).get((0, "host_to_device"), (0, 0))[1] == bytes_copied


WORK = f"launch:1:{KERNEL_NS}"


@pytest.mark.parametrize(
    "wait",
    [
        ("wait:1",),
        ("context",),
        ("record:1:1", "event:1"),
        ("query:1",),
        ("record:1:1", "join:2:1", "wait:2"),
        ("record:1:1", "join:2:1", "record:2:2", "event:2"),
        ("record:1:1", "join:2:1", "launch:2:1000", "query:2"),
    ],
)
def test_a_wait_for_the_stream_or_what_waits_for_it_drains_its_work(
    streams: Driver, own_probes: LibcudaProbes, wait: tuple[str, ...]
) -> None:
    process = streams.run(*TWO, WORK, WORK, *wait).process
    assert len(deliveries(own_probes, process)) == 1
    assert latencies(own_probes, process).sum_ns >= 2 * KERNEL_NS


@pytest.mark.parametrize(
    "idle",
    [
        ("wait:2",),
        ("record:1:2", "event:1"),
        ("query:2",),
        ("wait:0",),
        ("wait:9",),
        ("block",),
        ("record:1:1", WORK, "event:1"),  # only what came before is over
        ("record:1:2", "join:2:1", "wait:2"),
    ],
)
def test_a_wait_for_another_stream_drains_nothing(
    streams: Driver, own_probes: LibcudaProbes, idle: tuple[str, ...]
) -> None:
    process = streams.run(*TWO, WORK, *idle).process
    assert deliveries(own_probes, process) == []
    assert latencies(own_probes, process) is None


@pytest.mark.parametrize("wait", ["wait:0", "block", "context"])
def test_the_default_stream_waits_for_those_that_block_and_they_for_it(
    streams: Driver, own_probes: LibcudaProbes, wait: str
) -> None:
    process = streams.run("stream:1:0", WORK, wait).process
    assert deliveries(own_probes, process) == [1]
    process = streams.run("stream:1:0", f"launch:0:{KERNEL_NS}", WORK, "wait:1").process
    assert deliveries(own_probes, process) == [2]


def test_work_in_two_streams_is_drained_when_both_are(streams: Driver, own_probes: LibcudaProbes) -> None:
    both = (WORK, f"launch:2:{KERNEL_NS}")
    process = streams.run(*TWO, *both, "wait:1", "wait:2", *both, "wait:2", "wait:1").process
    assert deliveries(own_probes, process) == [2, 2]


def test_more_streams_than_have_a_place_are_drained_by_their_context_alone(
    streams: Driver, own_probes: LibcudaProbes
) -> None:
    made = [f"stream:{n}:{NON_BLOCKING}" for n in range(1, 7)]
    work = [f"launch:{n}:1000" for n in range(1, 7)]
    waits = [f"wait:{n}" for n in range(1, 7)]
    process = streams.run(*made, *work, *waits, "context").process
    assert deliveries(own_probes, process) == [6]
