# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Libraries that are not where libcuda is looked for: their launches are counted."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
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


REWRITTEN = {  # what is written: (whether it changes, whether a probed function is there)
    "beside-the-code": (True, False),
    "as-it-is": (False, True),
    "in-a-probed-function": (True, True),
}


def test_a_library_that_is_rewritten_all_the_time_is_not_attached_to_in_a_loop(node: Node, program: Path) -> None:
    with ExitStack() as stack:
        agent = stack.enter_context(node.agent(None, run_dir="rewritten"))
        stack.enter_context(node.container("training-neighbour", "offline", TRAINING))
        files = {where: node.folder / where / "libcuda.so.1" for where in REWRITTEN}
        for where, file in files.items():
            file.parent.mkdir(exist_ok=True)
            stack.enter_context(node.container(f"training-{where}", str(program), ("path", str(file))))
        for where, file in files.items():
            output = node.folder / f"{node.name(f'training-{where}')}.out"
            until(lambda: "second" in output.read_text(), "its second library")  # noqa: B023
            until(lambda: str(file) in agent.log.read_text(), "it to be probed")  # noqa: B023
        for where, (changes, in_function) in REWRITTEN.items():
            file = files[where]
            last = file.stat().st_size - 1
            offset = exported_functions(str(file), "cu")["cuMemcpyPeer"] if in_function else last
            stack.enter_context(rewritten(file, offset, changing=changes))
        time.sleep(12)  # the time in which it would be attached to
        attached = {where: agent.log.read_text().count(f"symbols of {file}") for where, file in files.items()}
        assert attached["beside-the-code"] <= 1
        assert attached["as-it-is"] <= 1
        assert attached["in-a-probed-function"] <= 4
        counting = [node.name(f"training-{one}") for one in ("neighbour", "beside-the-code", "as-it-is")]
        before = {one: launches(agent, one) for one in counting}
        until(lambda: all(launches(agent, one) > before[one] + 500 for one in counting), "launches to be counted")
        until(lambda: agent.snapshot().lost["libraries:rewritten"] > 0, "that one was rewritten")


@dataclass(frozen=True, slots=True)
class Programs:
    """Each container is one place's, and all run at once: what is looked for is looked for together.

    They keep the agent busy until the last test of this file.
    """

    node: Node
    agent: Agent

    def name(self, place: str) -> str:
        return self.node.name(f"training-{place}")

    def output(self, place: str) -> Path:
        return self.node.folder / f"{self.name(place)}.out"

    def counted(self, place: str) -> int:
        return launches(self.agent, self.name(place))

    def said(self, place: str) -> int:
        return int(self.output(place).read_text().split()[-1])


@pytest.fixture(scope="module")
def programs(node: Node, program: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        agent = stack.enter_context(node.agent(None, run_dir="second"))
        for place, (how, file) in PLACES.items():
            folder = node.folder / place
            folder.mkdir(exist_ok=True)
            stack.enter_context(node.container(f"training-{place}", str(program), (how, str(folder / file))))
        yield Programs(node, agent)


@pytest.mark.parametrize("place", PLACES)
def test_launches_through_a_second_library_are_counted_once(programs: Programs, place: str) -> None:
    agent, counted, said = programs.agent, partial(programs.counted, place), partial(programs.said, place)
    until(lambda: counted() > 0, "its launches with the first library")
    until(lambda: "second" in programs.output(place).read_text(), "its second library")
    until_another_tick(agent)  # with the last ones of the first library
    before = counted()
    until(lambda: counted() > before + AT_ONCE, "launches to be counted again")
    done = said()
    until_another_tick(agent)  # with those that it has said
    first = counted()
    until(lambda: counted() > first + 5 * AT_ONCE, "more of them")
    assert counted() - first <= said() - done + AT_ONCE
    row = agent.container(programs.name(place))
    assert row is not None
    until(lambda: True not in agent.container(programs.name(place)).unprobed.values(), "it to be known as probed")  # type: ignore[union-attr]
