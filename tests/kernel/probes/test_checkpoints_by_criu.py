# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""CRIU and watched processes: none ends because CRIU tries it, and what docs/operating.md says of CRIU holds.

CRIU is that of Debian 13, unpacked with all that it needs and not installed: Debian 12's does not start on Linux 6.18.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from tests.support.booting import or_skip
from tools.harness.stock_kernels import Archive
from tools.harness.wait import until

_SOURCE = Path(__file__).parents[2] / "support" / "programs" / "checkpointed.c"
_FUNCTION = "cuMemAlloc_v2"
_CALLS, _MANY_CALLS = 13, 500_009
_SECONDS = 30.0
_CACHES = (Path("/run/criu.kdat"), Path("/run/criu.kdat.tmp"))


@dataclass(frozen=True, slots=True)
class Criu:
    """The program, and the folder that one checkpoint is in."""

    command: tuple[str, ...]
    images: Path

    def dump(self, tgid: int, *options: str) -> str:
        """Empty: it was done, and without --leave-running the process is gone; else CRIU's log, and it runs on."""
        self.images.mkdir(exist_ok=True)
        done = self._run("dump", "--tree", str(tgid), *options)
        return "" if done.returncode == 0 else done.stdout or f"it ended with status {done.returncode}"

    def restore(self) -> int:
        """The pid of the process, a child of this one."""
        done = self._run("restore", "--restore-detached", "--restore-sibling", "--pidfile", "restored")
        assert done.returncode == 0, done.stdout
        return int((self.images / "restored").read_text())

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *arguments, "--images-dir", str(self.images), "-v4"]
        pipe = subprocess.PIPE
        return subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS, check=False)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """CRIU's, by its own dynamic linker and libraries. Skips where it cannot be had or cannot do anything.

    What it notes of the kernel, always in the same place, is removed again.
    """
    if platform.machine() != "x86_64" or not shutil.which("apt-get"):
        pytest.skip("the CRIU that is fetched is Debian's, for x86-64")
    folder = tmp_path_factory.mktemp("criu")
    with or_skip():
        root = Archive(folder, ["debian trixie"]).unpack("criu")
    libraries = root / "usr/lib/x86_64-linux-gnu"
    linker = [str(root / "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    command = (*linker, str(root / "usr/sbin/criu"))
    ours = [cache for cache in _CACHES if not cache.exists()]
    try:
        _require_any(Criu(command, folder / "images"))
        yield command
    finally:
        for cache in ours:
            cache.unlink(missing_ok=True)


def _require_any(criu: Criu) -> None:
    """Skips where not even a process that sleeps can be checkpointed."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(["sleep", "600"], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True) as sleep:
        try:
            refused = criu.dump(sleep.pid, "--leave-running")
        finally:
            sleep.kill()
    if refused:
        errors = [line for line in refused.splitlines() if "Error" in line]
        pytest.skip(f"CRIU cannot checkpoint any process here: {' '.join(errors) or refused}")


@pytest.fixture
def criu(command: tuple[str, ...], tmp_path: Path) -> Criu:
    return Criu(command, tmp_path / "images")


@dataclass(frozen=True, slots=True)
class Target:
    """A process of checkpointed.c, whose standard output is a file."""

    tgid: int
    output: Path

    def begin(self) -> None:
        """Has it call the function a number of times."""
        os.kill(self.tgid, signal.SIGUSR1)

    def has_called(self, times: int) -> bool:
        """Whether it did so that many times in its life."""
        return self.output.read_text().count("called\n") == times

    def call(self, times: int) -> None:
        """Waits for that."""
        self.begin()
        until(lambda: self.has_called(times), f"{self.tgid} to be done", _SECONDS)

    def has_uprobes_mapping(self) -> bool:
        """Whether the kernel has made the mapping for instructions that it executes out of line."""
        return "[uprobes]" in Path(f"/proc/{self.tgid}/maps").read_text()


@pytest.fixture
def libcuda(tmp_path: Path) -> Path:
    """A library of one function that the agent probes at its entry and return."""
    source, path = tmp_path / "libcuda.c", tmp_path / "libcuda.so.1"
    source.write_text(f"int {_FUNCTION}(void) {{ return 2; }}\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", path], check=True)
    return path


@contextmanager
def started(libcuda: Path, calls: int = _CALLS) -> Iterator[Target]:
    """A process that has loaded the library, until it is checkpointed or the block ends."""
    folder = libcuda.parent
    program, output = folder / "checkpointed", folder / "output"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-rpath,{folder}"]
    subprocess.run(["gcc", *flags, _SOURCE, libcuda, "-o", program], check=True)
    with (
        output.open("w") as file,
        subprocess.Popen(
            [program, str(calls)], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            until(lambda: output.read_text() == "ready\n", "the program to be ready", _SECONDS)
            yield Target(process.pid, output)
        finally:
            process.kill()


def checkpointed(criu: Criu, libcuda: Path) -> None:
    """A process that has loaded the library, and called nothing of it, becomes an image."""
    with started(libcuda) as target:
        assert not target.has_uprobes_mapping()
        assert not criu.dump(target.tgid)


@contextmanager
def restored(criu: Criu, libcuda: Path) -> Iterator[Target]:
    """The process of an image, until the end of the block at the latest."""
    tgid = criu.restore()
    descriptor = os.pidfd_open(tgid)
    try:
        yield Target(tgid, libcuda.parent / "output")
    finally:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
        os.waitpid(tgid, 0)


@contextmanager
def probed(libcuda: Path) -> Iterator[LibcudaProbes]:
    """By the agent's own programs."""
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        assert probes.ensure(str(libcuda)).attached == [_FUNCTION]
        yield probes


def test_criu_refuses_a_process_that_made_a_probed_call_which_runs_on_and_is_counted_exactly(
    criu: Criu, libcuda: Path
) -> None:
    with started(libcuda) as target:
        with probed(libcuda) as probes:
            target.call(1)
            answers = [criu.dump(target.tgid, "--leave-running"), criu.dump(target.tgid)]
            target.call(2)
            assert probes.calls() == {_FUNCTION: 2 * _CALLS}
        answers.append(criu.dump(target.tgid))  # the mapping stays when the agent is gone
        target.call(3)
        assert target.has_uprobes_mapping()
    for answer in answers:
        assert "Unsupported mapping found" in answer


def test_attempts_to_checkpoint_a_process_amid_its_calls_lose_none(criu: Criu, libcuda: Path) -> None:
    with started(libcuda, _MANY_CALLS) as target, probed(libcuda) as probes:
        answers: list[str] = []

        def attempt() -> bool:
            answers.append(criu.dump(target.tgid, "--leave-running"))
            return target.has_called(1)

        target.begin()
        until(attempt, "all calls", _SECONDS)
        assert len(answers) > 1
        assert probes.calls() == {_FUNCTION: _MANY_CALLS}


def test_a_process_that_is_not_watched_can_be_checkpointed_and_is_counted_where_it_is_restored(
    criu: Criu, libcuda: Path
) -> None:
    checkpointed(criu, libcuda)
    with probed(libcuda) as probes, restored(criu, libcuda) as target:
        target.call(1)
        assert probes.calls() == {_FUNCTION: _CALLS}


def test_once_the_agent_is_gone_a_process_that_made_no_probed_call_can_be_checkpointed_and_runs_on(
    criu: Criu, libcuda: Path
) -> None:
    with started(libcuda) as target:
        with probed(libcuda):
            pass  # breakpoints come and go
        assert not criu.dump(target.tgid)
    with restored(criu, libcuda) as target:
        target.call(1)


def test_a_process_that_loaded_a_probed_library_and_called_nothing_is_counted_where_it_is_restored_with_the_probes(
    criu: Criu, libcuda: Path
) -> None:
    with probed(libcuda) as probes:
        checkpointed(criu, libcuda)
        with restored(criu, libcuda) as target:
            target.call(1)
            assert probes.calls() == {_FUNCTION: _CALLS}


def test_restored_without_the_probes_it_ends_at_a_breakpoint_that_was_saved_with_it(criu: Criu, libcuda: Path) -> None:
    """Nothing of ours can prevent that: docs/operating.md says so, and what to do."""
    with probed(libcuda):
        checkpointed(criu, libcuda)
    with restored(criu, libcuda) as target:
        target.begin()
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = until(lambda: os.waitid(os.P_PID, target.tgid, options), "the process to end", _SECONDS)
        assert ended.si_status == signal.SIGTRAP
