# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the demo runs on the machine: the simulated GPU, two real containers, the agent. All are gone when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.core.errors import SetupError
from tools.harness.agents import wait_until_ready
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD


@dataclass(frozen=True, slots=True)
class Stage:
    """The demo's folder, and what is in it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For programs that use the simulated GPU."""
        return {"GPUSIM_DIR": str(self.folder / "gpu"), "LD_LIBRARY_PATH": str(BUILD / "lib")}

    @property
    def socket(self) -> Path:
        """Where the agent answers."""
        return self.folder / "run" / "agent.sock"

    def truth(self) -> list[dict[str, int]]:
        """The simulated GPU's own counts, a row per process: for the demo's figures only."""
        command = [str(BUILD / "bin" / "gpusim"), "truth"]
        out = subprocess.run(command, env=self.environment, check=False, capture_output=True, text=True)
        if out.returncode:
            raise SetupError(f"the simulated GPU does not answer: {out.stderr.strip()}")
        return [json.loads(line) for line in out.stdout.splitlines()]

    @contextmanager
    def container(self, name: str, program: str, arguments: Sequence[str]) -> Iterator[Container]:
        """A container that runs one of the workloads."""
        mounts = [Mount(BUILD), Mount(self.folder, read_only=False)]
        with Container.start(
            name,
            [str(BUILD / "bin" / program), *arguments],
            self.environment,
            cgroup_path=f"/gpuwarden-demo-{os.getpid()}/{name}",  # two demos do not meet
            mounts=mounts,
            output=self.folder / f"{name}.out",
            state=self.folder / "containers",
        ) as container:
            yield container


@contextmanager
def simulated_gpu(stage: Stage) -> Iterator[None]:
    """The server of the simulated GPU."""
    (stage.folder / "gpu").mkdir(parents=True)
    server = subprocess.Popen([BUILD / "bin" / "gpusim", "serve"], env=stage.environment, stdout=subprocess.PIPE)
    try:
        assert server.stdout
        if server.stdout.readline() != b"ready\n":
            raise SetupError("the simulated GPU did not start: run `make sim`")
        yield
    finally:
        _end(server)


@contextmanager
def agent(stage: Stage, policy: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`gpuwarden run`, with paths of the demo's own."""
    log = stage.folder / "agent.log"
    with log.open("wb") as stderr, (stage.folder / "decisions.jsonl").open("wb") as decisions:
        command = [sys.executable, "-I", "-m", "gpuwarden", "run", "--policy", str(policy), "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(
            [*command, "--run-dir", str(stage.folder / "run"), "--usage", str(stage.folder / "usage.sqlite")],
            env={**os.environ, **stage.environment},
            stdout=decisions,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            wait_until_ready(process, log)
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()
