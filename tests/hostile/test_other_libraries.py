# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Libraries that are not where libcuda is looked for: their launches are counted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.clock import monotonic_ns
from agent.node.elf import exported_functions
from tests.e2e.node import TRAINING, Agent, Node
from tests.hostile.programs import second_library
from tools.harness.wait import until

AT_ONCE = 20  # launches between two lines of second_library.c
PLACES = {
    "path": ("path", "libcuda.so.1"),
    "other-name": ("path", "libfont.so"),
    "odd-path": ("path", "a b\nlibcuda.so.1 \\012(deleted)"),
    "memfd": ("memfd", "x"),
    "over": ("over", "libcuda.so.1"),
    "over-named-otherwise": ("over", "data.bin"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, node: Node) -> Path:
    """The program, where containers have it."""
    made = second_library(tmp_path_factory.mktemp("second"))
    return Path(shutil.copy(made, node.folder / made.name))


@pytest.mark.parametrize("place", PLACES)
def test_launches_through_a_second_library_are_counted_once(node: Node, program: Path, place: str) -> None:
    how, file = PLACES[place]
    folder = node.folder / place
    folder.mkdir()
    with node.agent(None) as agent, node.container(f"training-{place}", str(program), (how, str(folder / file))):
        name, output = node.name(f"training-{place}"), node.folder / f"{node.name(f'training-{place}')}.out"

        def counted() -> int:
            return launches(agent, name)

        def said() -> int:
            return int(output.read_text().split()[-1])

        until(lambda: counted() > 0, "its launches with the first library")
        until(lambda: "second" in output.read_text(), "its second library")
        until_another_tick(agent)  # with the last ones of the first library
        before = counted()
        until(lambda: counted() > before + 100, "launches to be counted again")
        done = said()
        until_another_tick(agent)  # with those that it has said
        first = counted()
        until(lambda: counted() > first + 500, "more of them")
        assert counted() - first <= said() - done + AT_ONCE
        row = agent.container(name)
        assert row is not None
        until(lambda: True not in agent.container(name).unprobed.values(), "it to be known as probed")  # type: ignore[union-attr]


def until_another_tick(agent: Agent) -> None:
    """One that begins from now on."""
    now_ns = monotonic_ns()
    until(lambda: agent.snapshot().at_ns > now_ns, "another tick")


@contextmanager
def rewritten(path: Path, offset: int, *, changing: bool) -> Iterator[None]:
    """Inside the block a byte of the file is written every 20 ms: another one each time, or the same."""
    ending = threading.Event()
    original = path.read_bytes()[offset]

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY)
        for turn in range(1 << 30):
            os.pwrite(descriptor, bytes([original ^ (turn & 1 if changing else 0)]), offset)
            if ending.wait(0.02):
                break
        os.close(descriptor)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ending.set()
        writer.join()


def launches(agent: Agent, name: str) -> int:
    row = agent.container(name)
    return sum(usage.totals.launches for usage in row.usage) if row else 0


@pytest.mark.parametrize("where", ["beside the code", "as it is", "in a probed function"])
def test_a_library_that_is_rewritten_all_the_time_is_not_attached_to_in_a_loop(
    node: Node, program: Path, where: str
) -> None:
    folder = node.folder / where.replace(" ", "-")
    folder.mkdir()
    file, label = folder / "libcuda.so.1", f"training-{folder.name}"
    with (
        node.agent(None) as agent,
        node.container(label, str(program), ("path", str(file))),
        node.container("training-neighbour", "offline", TRAINING),
    ):
        name, output = node.name(label), node.folder / f"{node.name(label)}.out"
        until(lambda: "second" in output.read_text(), "its second library")
        until(lambda: str(file) in agent.log.read_text(), "it to be probed")
        functions = exported_functions(str(file), "cu")
        offset = file.stat().st_size - 1 if where == "beside the code" else functions["cuMemcpyPeer"]
        with rewritten(file, offset, changing=where != "as it is"):
            time.sleep(12)  # the time in which it would be attached to
            attached = agent.log.read_text().count(f"symbols of {file}")
            assert attached <= (4 if where == "in a probed function" else 1)
            counting = [node.name("training-neighbour"), *([] if where == "in a probed function" else [name])]
            before = {one: launches(agent, one) for one in counting}
            until(lambda: all(launches(agent, one) > before[one] + 500 for one in counting), "launches to be counted")
            if where == "in a probed function":
                until(lambda: agent.snapshot().lost["libraries:rewritten"] > 0, "that it was rewritten")
