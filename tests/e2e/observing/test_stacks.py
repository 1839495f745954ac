# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden stacks` on a program in a real container whose call paths are known (stacks.c)."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.protobuf import message_classes
from agent.stacks.output import MESSAGES, PACKAGE
from tests.e2e.node import PATIENCE_SECONDS, ROOT, Node
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD

_MIB = 1 << 20
_APPLICATION = Path("/app")  # not a folder of the host: only a look through the container's root finds the program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stacks.c with frame pointers, in a folder of its own."""
    path = tmp_path_factory.mktemp("application") / "trainer"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fno-omit-frame-pointer", f"-I{ROOT / 'sim/include'}"]
    source = ROOT / "tests/support/programs/stacks.c"
    subprocess.run(["gcc", *flags, str(source), "-o", str(path), f"-L{BUILD / 'lib'}", "-lcuda"], check=True)
    return path


@pytest.fixture(scope="module")
def trainer(node: Node, program: Path) -> Iterator[Container]:
    """The program in a container, ready."""
    with Container.start(
        f"trainer-{node.token}",
        [str(_APPLICATION / program.name)],
        node.stage.environment,
        mounts=[Mount(BUILD), Mount(node.folder, read_only=False), Mount(program.parent, _APPLICATION)],
        state=node.folder / "containers",
    ) as container:
        assert container.stdout
        assert container.stdout.readline() == "ready\n", container.errors()
        yield container


def do(container: Container, work: str) -> None:
    """Lets it work, and waits for it."""
    container.stdin.write(f"{work}\n")
    container.stdin.flush()
    assert container.stdout
    assert container.stdout.readline() == "done\n", container.errors()


@contextmanager
def looking(node: Node, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, once its probes are there."""
    command = node.command("stacks", *arguments, "--seconds", "600")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=node.environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stderr
        first = process.stderr.readline()
        assert first.startswith("looking"), first + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ctrl-C; stdout and stderr."""
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    return out, errors


def stacks_of(node: Node, container: Container, work: str, *arguments: str) -> tuple[str, str]:
    """What the command prints about that work."""
    with looking(node, "--container", container.name, *arguments) as process:
        do(container, work)
        return end(process)


def through(out: str, *path: str) -> int:
    """The sum of the folded stacks in which these frames follow each other."""
    wanted = ";" + ";".join(path) + ";"
    return sum(int(line.rpartition(" ")[2]) for line in out.split("\n") if wanted in line.rpartition(" ")[0] + ";")


def test_every_launch_is_counted_where_it_was_made(node: Node, trainer: Container) -> None:
    out, errors = stacks_of(node, trainer, "launch 100", "--every", "1")
    assert through(out, "main", "launch", "train_step", "submit", "cuLaunchKernel") == 200, out
    assert through(out, "main", "launch", "evaluate", "submit", "cuLaunchKernel") == 100, out
    assert "lost: nothing" in errors


def test_a_sample_of_the_launches_tells_their_number_and_ratio(node: Node, trainer: Container) -> None:
    out, _ = stacks_of(node, trainer, "launch 3000", "--every", "5")
    train, evaluate = through(out, "train_step", "submit"), through(out, "evaluate", "submit")
    assert train % 5 == evaluate % 5 == 0
    assert 5000 < train < 7000  # 6000 ± 155: six deviations
    assert 2400 < evaluate < 3600


def test_live_bytes_are_counted_where_they_were_allocated(node: Node, trainer: Container) -> None:
    out, errors = stacks_of(node, trainer, "keep 5", "--kind", "alloc")
    assert through(out, "main", "keep", "load_weights", "take", "cuMemAlloc_v2") == 15 * _MIB, out
    assert through(out, "main", "keep", "grow_cache", "take", "cuMemAlloc_v2") == 5 * _MIB, out
    assert "scratch" not in out
    assert "before the command began" in errors


def test_the_profile_and_the_json_have_the_same_stacks(node: Node, trainer: Container, tmp_path: Path) -> None:
    file = tmp_path / "launches.pb.gz"
    out, _ = stacks_of(node, trainer, "launch 10", "--every", "1", "--json", "--out", str(file))
    stacks = json.loads(out)["stacks"]
    assert sum(stack["value"] for stack in stacks) == 30
    read = message_classes(PACKAGE, MESSAGES)["Profile"].FromString(gzip.decompress(file.read_bytes()))
    assert sum(sample.value[0] for sample in read.sample) == 30
    names = {read.string_table[function.name] for function in read.function}
    assert names == {frame for stack in stacks for frame in stack["frames"]}
    assert {"train_step", "evaluate", "cuLaunchKernel"} <= names


def test_folded_stacks_go_to_a_file_by_its_suffix(node: Node, trainer: Container, tmp_path: Path) -> None:
    file = tmp_path / "launches.folded"
    out, _ = stacks_of(node, trainer, "launch 10", "--every", "1", "--out", str(file))
    assert out == ""
    assert through(file.read_text(), "main", "launch", "train_step", "submit", "cuLaunchKernel") == 20


def test_a_file_of_another_kind_is_refused_before_anything_is_sampled(node: Node, tmp_path: Path) -> None:
    done = node.run("stacks", "--container", "any", "--out", str(tmp_path / "launches.svg"))
    assert done.returncode == 2
    assert "give FILE.pb.gz for pprof" in done.stderr


def test_without_symbols_a_frame_is_a_module_and_an_offset(node: Node, trainer: Container) -> None:
    out, _ = stacks_of(node, trainer, "launch 1", "--every", "1", "--no-symbols")
    assert ";trainer+0x" in out
    assert "libcuda.so" in out
    assert "train_step" not in out


def test_another_container_that_shares_the_library_is_not_in_it(node: Node, trainer: Container, program: Path) -> None:
    with Container.start(
        f"other-{node.token}",
        [str(_APPLICATION / program.name)],
        node.stage.environment,
        mounts=[Mount(BUILD), Mount(node.folder, read_only=False), Mount(program.parent, _APPLICATION)],
        state=node.folder / "containers",
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "ready\n", other.errors()
        with looking(node, "--container", trainer.name, "--every", "1") as process:
            do(other, "launch 50")
            do(trainer, "launch 1")
            out, _ = end(process)
    assert sum(int(line.rpartition(" ")[2]) for line in out.splitlines()) == 3


def test_names_of_a_process_that_ended_meanwhile_are_modules_at_least(node: Node, program: Path) -> None:
    with Container.start(
        f"brief-{node.token}",
        [str(_APPLICATION / program.name)],
        node.stage.environment,
        mounts=[Mount(BUILD), Mount(node.folder, read_only=False), Mount(program.parent, _APPLICATION)],
        state=node.folder / "containers",
    ) as brief:
        assert brief.stdout
        assert brief.stdout.readline() == "ready\n", brief.errors()
        with looking(node, "--container", brief.name, "--every", "1", "--no-symbols") as process:
            do(brief, "launch 7")
            brief.stop()
            out, _ = end(process)
    assert sum(int(line.rpartition(" ")[2]) for line in out.splitlines()) == 21
    assert ";trainer+0x" in out


def test_it_works_beside_a_running_agent(node: Node, trainer: Container) -> None:
    with node.agent(None, run_dir="beside-stacks"):
        out, _ = stacks_of(node, trainer, "launch 20", "--every", "1")
    assert through(out, "launch", "train_step", "submit", "cuLaunchKernel") == 40, out


def test_an_unknown_container_is_refused_with_those_that_there_are(node: Node, trainer: Container) -> None:
    done = node.run("stacks", "--container", f"unknown-{node.token}")
    assert done.returncode == 1
    assert trainer.name in done.stderr


def test_without_root_it_asks_for_root(node: Node) -> None:
    command = node.command("stacks", "--container", "any")
    unprivileged = ["setpriv", "--reuid", "65534", "--clear-groups", *command]
    done = subprocess.run(unprivileged, env=os.environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "are missing" in done.stderr) == (3, True), done.stderr
