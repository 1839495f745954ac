# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MPS control daemons, NVIDIA's own and simulated ones, each in a folder of its own, and asked by its own program.

A server that starts is, of a real one, a program of that name that does nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tools.harness.node import BUILD, simulated_node
from tools.harness.wait import until

PROGRAM: Final = "nvidia-cuda-mps-control"
_SECONDS: Final = 60.0
Answer = str | Mapping[int, str]  # by the first release that gives it


@dataclass(frozen=True, slots=True)
class Control:
    """A control daemon in a folder of its own. `starter`: environment of the daemon that holds its servers starting."""

    release: int
    program: Path
    folder: Path
    environment: Mapping[str, str]
    starter: Mapping[str, str]

    def run(self, *arguments: str, given: str = "", user: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program), *arguments],
            env={**os.environ, **self.environment},
            input=given,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            user=user,
        )

    def ask(self, command: str, user: int = 0) -> str:
        """The answer. Whatever it says, the exit code is 0."""
        done = self.run(given=f"{command}\n", user=user)
        assert (done.returncode, done.stderr) == (0, ""), command
        return done.stdout

    def expected(self, answer: Answer) -> str:
        if isinstance(answer, str):
            return answer
        return answer[max(release for release in answer if release <= self.release)]

    @contextmanager
    def daemon(self, starting: bool = False, user: int = 0) -> Iterator[None]:
        extra = self.starter if starting else {}
        # The daemon would keep pipes open that are read to their end.
        command, environment = [str(self.program), "-d"], {**os.environ, **self.environment, **extra}
        subprocess.run(command, env=environment, check=True, timeout=_SECONDS, user=user)
        try:
            yield
        finally:
            self.run(given="quit -t 0\n")
            until(lambda: self.run(given="get_server_list\n").returncode == 1, "the daemon's end")

    @property
    def pipes(self) -> Path:
        return self.folder / "pipes"


def _directories(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipes"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "logs")}


def real(major: str, libraries: Path, folder: Path) -> Control:
    """A copy of NVIDIA's program, which other users reach too."""
    shutil.copy(libraries.parents[3] / "bin" / PROGRAM, folder / PROGRAM)
    (folder / "servers").mkdir()
    server = folder / "servers" / "nvidia-cuda-mps-server"
    server.write_text("#!/bin/sh\nexec sleep 1000\n")
    server.chmod(0o755)
    starter = {"PATH": f"{server.parent}:{os.environ['PATH']}"}
    return Control(
        int(major), folder / PROGRAM, folder, {"LD_LIBRARY_PATH": str(libraries), **_directories(folder)}, starter
    )


@contextmanager
def simulated(major: str, folder: Path) -> Iterator[Control]:
    """On a simulated GPU, set to answer as that driver's."""
    shutil.copy(BUILD / "bin" / PROGRAM, folder / PROGRAM)
    with simulated_node(folder / "gpu") as node:
        for path in (folder / "gpu").iterdir():
            path.chmod(0o777)
        environment = {**node.environment, **_directories(folder), "GPUSIM_MPS_VERSION": major}
        yield Control(int(major), folder / PROGRAM, folder, environment, {})


@contextmanager
def starting_server(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A daemon, and the pid of its server, which does not become ready."""
    with control.daemon(starting=True):
        monkeypatch.setenv("GPUSIM_MPS_STARTING", "1")
        assert control.ask("start_server -uid 0") == ""
        (server,) = until(lambda: control.ask("get_server_list").split(), "a server in the list")
        try:
            yield int(server)
        finally:
            if control.starter:
                os.kill(int(server), signal.SIGKILL)
