# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A simulated GPU node for tests and benches: the server in a folder of its own, and the programs that use it.

Leaving the `with` block of `simulated_node` ends everything that was started through it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.harness.wait import until

SIM = Path(__file__).resolve().parents[2] / "sim"
BUILD = Path(os.environ.get("GPUWARDEN_SIM_BUILD", SIM / "build"))
_PATIENCE_SECONDS = 60.0


def compile_client(source: Path, target: Path, *flags: str) -> Path:
    """A C program against the simulated libcuda, as any is compiled against the real one. Returns `target`."""
    strict = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", f"-I{SIM / 'include'}", f"-I{SIM}"]
    libraries = [f"-L{BUILD / 'lib'}", "-lcuda", "-lpthread"]
    subprocess.run(["gcc", *strict, *flags, str(source), "-o", str(target), *libraries], check=True)
    return target


@dataclass(slots=True)
class Node:
    """A running server, and the environment in which its clients find it."""

    folder: Path
    mps: bool = False  # programs started from now on find the MPS daemon's pipe
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def server_tgid(self) -> int:
        """The simulated GPU's process."""
        return self._running[0].pid

    @property
    def environment(self) -> dict[str, str]:
        """For a program that is to use this node's GPUs."""
        pipe = self.folder / ("mps" if self.mps else "no-mps")
        return {
            "GPUSIM_DIR": str(self.folder),
            "LD_LIBRARY_PATH": str(BUILD / "lib"),
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "mps-log"),
        }

    def start(
        self, program: str, arguments: Sequence[str] = (), extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """One of the programs in sim/build/bin, with pipes to it. It ends with the node."""
        environment = {**os.environ, **self.environment, **(extra or {})}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [str(BUILD / "bin" / program), *arguments], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self._running.append(process)
        return process

    def run(
        self, program: str, arguments: Sequence[str] = (), given: str = "", extra: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of these programs to its end."""
        process = self.start(program, arguments, extra)
        out, err = process.communicate(given, timeout=_PATIENCE_SECONDS * 5)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def truth(self) -> list[dict[str, Any]]:
        """What really happened, one entry for each process on each device."""
        return self._lines("truth")

    def status(self) -> list[dict[str, Any]]:
        """The devices as they are now."""
        return self._lines("status")

    def fault(self, *arguments: str) -> None:
        """Injects a fault."""
        done = self.run("gpusim", ["fault", *arguments])
        assert done.returncode == 0, done.stderr

    def mps_control(self, *commands: str) -> subprocess.CompletedProcess[str]:
        """Output of nvidia-cuda-mps-control for these commands."""
        return self.run("nvidia-cuda-mps-control", given="".join(f"{command}\n" for command in commands))

    @contextmanager
    def mps_daemon(self, server: bool = True) -> Iterator[None]:
        """Runs an MPS daemon; programs that are started inside use it. `server`: with one, before the first client."""
        self.mps = True
        # The daemon would keep pipes open that are read to their end.
        command = [str(BUILD / "bin" / "nvidia-cuda-mps-control"), "-d"]
        subprocess.run(command, env={**os.environ, **self.environment}, check=True, timeout=_PATIENCE_SECONDS)
        try:
            if server:
                self.mps_control(f"start_server -uid {os.geteuid()}")
                until(self._has_ready_server, "the MPS server to be ready")
            yield
        finally:
            self.mps_control("quit -t 0")
            self.mps = False

    def _has_ready_server(self) -> bool:
        servers = self.mps_control("get_server_list").stdout.split()
        answer = self.mps_control(f"get_active_thread_percentage {servers[0]}").stdout if servers else ""
        return answer.startswith(tuple("0123456789"))  # one that starts says nothing

    def end(self) -> None:
        """Ends what still runs, the server last."""
        for process in reversed(self._running):
            if process.poll() is None:
                process.kill()
            process.communicate()

    def _lines(self, command: str) -> list[dict[str, Any]]:
        done = self.run("gpusim", [command])
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def simulated_node(folder: Path, config: Mapping[str, str] | None = None, program: str = "gpusim") -> Iterator[Node]:
    """A node whose server is ready. `config`: GPUs, SMs and so on, as `gpusim serve --config` reads them.

    `program`: a link to gpusim, where it matters what the server is called.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "gpusim.conf"
    settings.write_text("".join(f"{key} = {value}\n" for key, value in (config or {}).items()))
    node = Node(folder)
    server = node.start(program, ["serve", "--dir", str(folder), "--config", str(settings)])
    try:
        assert server.stdout
        if server.stdout.readline() != "ready\n":
            raise RuntimeError("the simulated GPU did not start: run `make sim`, and see what it says")
        yield node
    finally:
        node.end()
