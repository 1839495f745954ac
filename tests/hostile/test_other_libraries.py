# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Libraries that are not where libcuda is looked for: their launches are counted within seconds."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.node.elf import exported_functions
from tests.e2e.node import TRAINING, Agent, Node
from tests.hostile.programs import second_library
from tools.harness.wait import until

SEEN_SECONDS = 15.0  # three to four on a machine with nothing else to do
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
def test_launches_through_a_second_library_are_counted_within_seconds(node: Node, program: Path, place: str) -> None:
    how, file = PLACES[place]
    folder = node.folder / place
    folder.mkdir()
    with node.agent(None) as agent, node.container(f"training-{place}", str(program), (how, str(folder / file))):
        name, output = node.name(f"training-{place}"), node.folder / f"{node.name(f'training-{place}')}.out"

        def counted() -> int:
            return launches(agent, name)

        until(lambda: counted() > 0, "its launches with the first library")
        until(lambda: "second" in output.read_text(), "its second library")
        began = time.monotonic()
        before = counted()
        time.sleep(1.5)  # for the tick that has the last ones of the first library
        before = counted()
        until(lambda: counted() > before + 100, "launches to be counted again")
        assert time.monotonic() - began < SEEN_SECONDS
        first, said = counted(), int(output.read_text().split()[-1])
        until(lambda: counted() > first + 500, "more of them")
        done = int(output.read_text().split()[-1]) - said
        assert counted() - first < 1.5 * done + 500  # once each, but for those of the tick before
        row = agent.container(name)
        assert row is not None
        until(lambda: True not in agent.container(name).unprobed.values(), "it to be known as probed")  # type: ignore[union-attr]


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
            time.sleep(3)
            before, beside = launches(agent, name), launches(agent, node.name("training-neighbour"))
            time.sleep(9)
            if where != "in a probed function":
                assert launches(agent, name) > before + 500
            assert launches(agent, node.name("training-neighbour")) > beside + 500
            attached = agent.log.read_text().count(f"symbols of {file}")
            assert attached <= (4 if where == "in a probed function" else 1)
            if where == "in a probed function":
                assert agent.snapshot().lost["libraries:rewritten"] > 0
