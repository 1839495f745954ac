# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where an item finds what it needs, and how it starts programs. Whatever was started through it ends with the item."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen
from typing import Any, Final

from conformance import process_tree
from tools.harness.wait import poll

OVERDUE: Final = 124  # the exit status of a program that was ended because it took too long, as timeout(1) has it
_CONTROL: Final = "nvidia-cuda-mps-control"
_CONTROL_FOLDERS: Final = (Path("/usr/bin"), Path("/usr/local/nvidia/bin"), Path("/run/nvidia/driver/usr/bin"))
_TERM_SECONDS = 5.0
_CLOSING_SECONDS = 2.0
_MPS_SECONDS = 20.0
_STARTING_SECONDS = 3.0
_STEP_SECONDS = 0.02
_FINDS = """
import importlib.util, sys
try:
    found = importlib.util.find_spec(sys.argv[1]) is not None
except ImportError:
    found = False
sys.exit(0 if found else 1)
"""


class Unavailable(Exception):  # noqa: N818  # nothing went wrong
    """The item, or a part of it, cannot be had here; the message is the note of a skipped row."""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as an item sees it. conformance/isolation.py makes it."""

    simulated: bool
    quick: bool  # on the simulated GPU in CI: an item repeats things so seldom that it takes 6 s at most
    folder: Path  # of this item alone; removed afterwards
    libcuda: Path | None  # the file that programs load, links resolved; None: none found
    libnvml: Path | None
    workloads: Path  # has `online` and `offline`; simulated: `gpusim` and `nvidia-cuda-mps-control` too
    bpf_objects: Path  # has gpuwarden.bpf.o and its companions
    bpf: str | None  # why BPF programs and uprobes cannot be used here; None: they can
    python: str  # the interpreter that has the frameworks, if any
    environment: Mapping[str, str]  # for every program that is to use the GPU
    node: Any = None  # tools.harness.node.Node where simulated: for the truth, and for nothing else
    seconds: float = float("inf")  # that this item has in this run
    _running: list[Popen[str]] = field(default_factory=list, repr=False)
    _modules: dict[str, bool] = field(default_factory=dict, repr=False)

    def start(self, command: Sequence[str], extra: Mapping[str, str] | None = None, **popen: Any) -> Popen[str]:
        """A program in a process group of its own, with pipes of text to it. OSError where it cannot be started.

        `extra` goes into its environment, `popen` to Popen.
        """
        environment = {**os.environ, **self.environment, **(extra or {})}
        given: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "process_group": 0, **popen}
        process = Popen([str(word) for word in command], env=environment, text=True, **given)
        self._running.append(process)
        return process

    def run(
        self, command: Sequence[str], extra: Mapping[str, str] | None = None, timeout: float = 60.0, given: str = ""
    ) -> CompletedProcess[str]:
        """A program to its end, with `given` on its standard input. After `timeout` seconds: ended, status OVERDUE."""
        process = self.start(command, extra)
        try:
            out, err = process.communicate(given, timeout=timeout)
            return CompletedProcess(process.args, process.returncode, out, err)
        except subprocess.TimeoutExpired:
            _end_group(process)
            out, err = _rest(process)
            return CompletedProcess(process.args, OVERDUE, out, f"{err}\nnot done within {timeout:g} s")
        finally:
            self.end(process)

    def end(self, process: Popen[str]) -> None:
        """Asks it and all of its group to end, insists after a while, waits for it and closes its pipes."""
        _end_group(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError, ValueError):
                    pipe.close()
        if process in self._running:
            self._running.remove(process)

    def end_all(self) -> None:
        """Ends all that still run, the last one first."""
        for process in reversed(list(self._running)):
            self.end(process)

    def has(self, module: str) -> bool:
        """Whether `python` finds the module: torch, triton, cupy, jax, cuda.bindings. Asked once."""
        if module not in self._modules:
            self._modules[module] = self.run([self.python, "-c", _FINDS, module]).returncode == 0
        return self._modules[module]

    @contextmanager
    def mps(self) -> Iterator[Mapping[str, str]]:
        """An MPS daemon in pipe and log folders of its own; yields the environment of its clients, and stops it.

        Unavailable where there is none, or where it does not start.
        """
        pipes, logs = self.folder / "mps", self.folder / "mps-log"
        pipes.mkdir(exist_ok=True)
        logs.mkdir(exist_ok=True)
        clients = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        control = str(self.mps_control())
        try:
            self._start_mps(control, clients)
            yield clients
        finally:
            with suppress(OSError):
                self.run([control], clients, timeout=_MPS_SECONDS, given="quit -t 1\n")
            _end_daemons(pipes)

    def mps_control(self) -> Path:
        """The program. Unavailable where there is none."""
        folders = [self.workloads] if self.simulated else [*map(Path, _path()), *_CONTROL_FOLDERS]
        found = next((folder / _CONTROL for folder in folders if os.access(folder / _CONTROL, os.X_OK)), None)
        if found is None:
            raise Unavailable(f"{_CONTROL} is neither on the PATH nor in {', '.join(map(str, _CONTROL_FOLDERS))}")
        return found

    def _start_mps(self, control: str, clients: Mapping[str, str]) -> None:
        # It would keep pipes open that are read to their end.
        process = self.start(
            [control, "-d"], clients, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, process_group=None
        )
        try:
            status = process.wait(_MPS_SECONDS)
        except subprocess.TimeoutExpired:
            self.end(process)
            raise Unavailable(f"`{control} -d` did not come back within {_MPS_SECONDS:g} s") from None
        self._running.remove(process)
        poll(lambda: status or not self._asked(control, clients).returncode, _STARTING_SECONDS, _STEP_SECONDS)
        answer = self._asked(control, clients)
        if status or answer.returncode:
            output = (answer.stderr or answer.stdout).strip() or "nothing"
            raise Unavailable(f"the MPS daemon does not answer (exit status {status}); it says: {output[-300:]}")

    def _asked(self, control: str, clients: Mapping[str, str]) -> CompletedProcess[str]:
        return self.run([control], clients, timeout=_MPS_SECONDS, given="get_server_list\n")


def path_with_control() -> str:
    """PATH, with the folders at its end where MPS may be: its daemon looks for its server there."""
    return os.pathsep.join(dict.fromkeys([*_path(), *map(str, _CONTROL_FOLDERS)]))


def _path() -> list[str]:
    return [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]


def _end_daemons(pipes: Path) -> None:
    """Daemon and servers of this pipe folder, which `quit` should have ended: a client that hangs keeps them."""
    wanted = f"CUDA_MPS_PIPE_DIRECTORY={pipes}"
    named = _CONTROL.removesuffix("-control")[:15]

    def daemons() -> list[process_tree.Process]:
        return [p for p in process_tree.with_variable(wanted) if process_tree.name(p).startswith(named)]

    poll(lambda: not daemons(), _TERM_SECONDS, _STEP_SECONDS)
    process_tree.end(daemons())


def _end_group(process: Popen[str]) -> None:
    """By its group, which keeps its number while its leader is not waited for."""
    if process.returncode is not None:
        return
    for number in (signal.SIGCONT, signal.SIGTERM):
        _signal_group(process, number)
    poll(lambda: not _runs(process), _TERM_SECONDS, _STEP_SECONDS)
    _signal_group(process, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
        process.wait(_TERM_SECONDS)


def _signal_group(process: Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)


def _runs(process: Popen[str]) -> bool:
    """Without waiting for it as Popen.poll does: that would give its number away."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _rest(process: Popen[str]) -> tuple[str, str]:
    """The rest of an ended program's output. A child that left its group may hold the pipes."""
    try:
        return process.communicate(timeout=_CLOSING_SECONDS)
    except subprocess.TimeoutExpired:
        return "", ""
