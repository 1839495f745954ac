# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The containers of a run: cgroups that look like Docker's, and the workloads in them.

No runtime: a container of 300 ms would be mostly that. All that attribution knows of a container is its cgroup.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.core.errors import SetupError
from bench.attribution.recording import Life
from bench.attribution.scenarios import Tenant
from tools.harness import cgroups
from tools.harness.node import BUILD, Node

_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'  # the workload itself is in its cgroup from its first instruction


@dataclass(slots=True)
class Containers:
    """The tenants' containers. `lives` grows as they start and end; several threads write it."""

    node: Node
    folder: Path
    uuids: Mapping[int, str]  # of devices, by the simulated GPU's own number
    path: str
    _ending: threading.Event = field(default_factory=threading.Event)
    _lives: dict[str, Life] = field(default_factory=dict)
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lives(self) -> list[Life]:
        """Every workload that was started so far."""
        with self._lock:
            return list(self._lives.values())

    def start(self, tenant: Tenant) -> tuple[str, subprocess.Popen[bytes]]:
        """Starts one container; returns its id."""
        name = uuid.uuid4().hex * 2
        cgroup = cgroups.hierarchy() / self.path.lstrip("/") / name
        cgroup.mkdir(parents=True)
        program = str(BUILD / "bin" / tenant.program)
        environment = {**os.environ, **self.node.environment, **self._environment(tenant)}
        with (self.folder / f"{tenant.name}.err").open("ab") as stderr:
            process = subprocess.Popen(
                ["sh", "-c", _ENTER, str(cgroup), program, *tenant.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        with self._lock:
            self._lives[name] = Life(tenant.name, name, process.pid, time.monotonic_ns())
            self._running[name] = process
        return name, process

    def _environment(self, tenant: Tenant) -> dict[str, str]:
        visible = tenant.visible if tenant.instance is None else self.uuids[tenant.instance]
        set_to = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": tenant.percentage, "CUDA_VISIBLE_DEVICES": visible}
        return {name: str(value) for name, value in set_to.items() if value is not None}

    def one_after_another(self, tenant: Tenant) -> None:
        """Jobs: each in a container of its own, the next when the last has ended. Until `end`."""
        while not self._ending.is_set():
            name, process = self.start(tenant)
            process.wait()
            with self._lock:
                self._lives[name] = replace(self._lives[name], end_ns=time.monotonic_ns())
                del self._running[name]
            cgroups.remove(f"{self.path}/{name}", ())
            if process.returncode and not self._ending.is_set():
                return  # `require_alive` says why

    def end(self) -> None:
        """Kills every workload, and starts no more."""
        self._ending.set()
        with self._lock:
            for process in self._running.values():
                process.kill()
                process.wait()

    def require_alive(self, tenant: Tenant) -> None:
        """Checks that none has ended by itself. SetupError, with its stderr."""
        words = (self.folder / f"{tenant.name}.err").read_text().strip()
        with self._lock:
            ids = {life.id for life in self._lives.values() if life.name == tenant.name}
            alive = any(self._running[i].poll() is None for i in ids & self._running.keys())
        if words or not (alive or tenant.jobs):
            raise SetupError(f"{tenant.name} ({tenant.program} {' '.join(tenant.arguments)}) failed: {words}")


@contextmanager
def running(node: Node, folder: Path, uuids: Mapping[int, str], tenants: tuple[Tenant, ...]) -> Iterator[Containers]:
    """All workloads at work. They are gone after the block."""
    folder.mkdir()
    containers = Containers(node, folder, uuids, f"/gpuwarden-bench-{os.getpid()}/docker")
    with cgroups.own(containers.path), ThreadPoolExecutor(len(tenants)) as pool:
        following = []
        try:
            for tenant in tenants:
                if tenant.jobs:
                    following.append(pool.submit(containers.one_after_another, tenant))
                else:
                    containers.start(tenant)
            yield containers
        finally:
            containers.end()
        for future in following:
            future.result()  # raises what went wrong in it
