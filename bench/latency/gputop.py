# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench gputop`: what the live view costs.

gputop on a terminal of 120 x 40, asking an agent that gives a made-up snapshot of 8 GPUs, 100 containers and their
processes a second, all figures of which change. Its CPU time over some seconds, begun once it has drawn for a while;
in which it has to live, and to draw. The aim is set for 200 processes; what 1,000 take is printed, too.
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    EnforcementStatus,
    FunctionUsage,
    Process,
    ProcessId,
    ProcessUsage,
    Provenance,
    Snapshot,
    Usage,
)
from agent.exporters.api.routes import Api, listeners
from agent.exporters.web.server import HttpServer

MOST_RATIO: Final = 0.03
AIMED: Final = (8, 100, 200)  # devices, containers, processes
BEYOND: Final = (8, 100, 1000)
_WARM_UP_SECONDS: Final = 5.0
_GIB: Final = 1 << 30
_PROGRAM: Final = "from gpuwarden.main import gputop; gputop()"


def snapshot(devices: int, containers: int, processes: int, number: int) -> Snapshot:
    """The n-th tick: each container on one device, with as many processes as the others."""
    uuids = [DeviceUuid(f"GPU-{index:08d}-0000-0000-0000-000000000000") for index in range(devices)]
    owners = [_container(index, number, uuids, processes // containers) for index in range(containers)]
    now = time.monotonic_ns()
    return Snapshot(
        at_ns=now,
        wall_ns=time.time_ns(),
        interval_ns=1_000_000_000,
        devices=tuple(_reading(index, uuid, number) for index, uuid in enumerate(uuids)),
        containers=tuple(owners),
        processes=tuple(_process(member, owner) for owner in owners for member in owner.processes),
        enforcement={owner.container.key: _said(index, number) for index, owner in enumerate(owners)},
        enforcing=True,
    )


def _reading(index: int, uuid: DeviceUuid, number: int) -> DeviceReading:
    device = Device(index, uuid, "Made-up GPU", f"00000000:{index + 1:02X}:00.0", 132, 80 * _GIB)
    ratio = (index * 13 + number * 7) % 100 / 100
    return DeviceReading(
        device,
        sm_activity_ratio=ratio,
        sm_activity_source="gpm",
        memory_used_bytes=int(80 * _GIB * ratio),
        pcie_tx_bytes_per_second=ratio * 1e9,
        pcie_rx_bytes_per_second=ratio * 2e9,
        power_watts=700 * ratio,
        power_limit_watts=700.0,
        temperature_celsius=60.0,
    )


def _container(index: int, number: int, uuids: Sequence[DeviceUuid], processes: int) -> ContainerUsage:
    key = ContainerKey(f"containerd:{index:064d}")
    owner = Container(
        key, f"worker-{index}", "containerd", f"{index:064d}", f"pod-{index}", "batch", "registry/image:1"
    )
    device = uuids[index % len(uuids)]
    members = tuple(ProcessId(1000 + index * processes + one, 12345) for one in range(processes))
    ratio = (index * 17 + number * 11) % 100 / 1000
    usage = Usage(device, ratio, Provenance.ESTIMATED, int(ratio * _GIB), 1e6 * number, 2e6 * ratio, 1e4 * ratio)
    kernels = tuple(FunctionUsage(f"kernel_{one}", device, 10.0 * one, ratio / 5, 1e-5) for one in range(5))
    return ContainerUsage(owner, (usage,), members, kernels)


def _process(member: ProcessId, owner: ContainerUsage) -> ProcessUsage:
    process = Process(member, "python train.py --epochs 90 --batch-size 256", "root", owner.container.key)
    return ProcessUsage(process, tuple(replace(one, launches_per_second=1.0) for one in owner.usage))


def _said(index: int, number: int) -> EnforcementStatus:
    if index % 4 == 0:
        latency = 0.001 * ((index + number) % 60)
        return EnforcementStatus("online", "chat", latency, 0.99, 0.050, slack_ratio=1 - latency / 0.050)
    share = (index + number) % 100 / 100
    reason = f"slack {share:.0%}: the queue is as long as that allows"
    return EnforcementStatus("offline", "training", share_ratio=share, paused_ratio=1 - share, reason=reason)


@contextmanager
def agent(socket: Path, shape: tuple[int, int, int]) -> Iterator[None]:
    """Answers on the socket with a new snapshot each second."""
    ending, made = threading.Event(), [snapshot(*shape, 0)]

    def tick() -> None:
        while not ending.wait(1.0):
            made.append(snapshot(*shape, len(made)))

    api = Api(lambda: made[-1], lambda container: "{}", lambda reply: None)
    server = HttpServer(listeners(socket.parent, api, None))
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        server.close()


@dataclass(slots=True)
class Running:
    """gputop, and what it has drawn since the last read."""

    process: subprocess.Popen[bytes]
    drawn: bytearray = field(default_factory=bytearray)

    def read(self, master: int) -> None:
        """Reads gputop's output as it comes."""
        try:
            while data := os.read(master, 65536):
                self.drawn += data
        except OSError:  # the last one on the terminal has gone
            return

    def require_drawn(self) -> None:
        """Checks that it runs and has drawn containers. RuntimeError."""
        drawn = bytes(self.drawn[-2000:])
        if self.process.poll() is not None:
            raise RuntimeError(f"gputop has ended with {self.process.returncode}: {drawn!r}")
        if b"worker-" not in self.drawn:
            raise RuntimeError(f"gputop has drawn no container: {drawn!r}")


@contextmanager
def top(socket: Path) -> Iterator[Running]:
    """gputop on a terminal that is read all the time."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 120))
    command = [sys.executable, "-c", _PROGRAM, "--socket", str(socket)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    running = Running(process)
    reader = threading.Thread(target=running.read, args=(master,))
    reader.start()
    try:
        yield running
    finally:
        process.terminate()
        process.wait()
        reader.join()
        os.close(master)


def cpu_ratio(shape: tuple[int, int, int], seconds: float) -> float:
    """The part of one CPU that it takes. RuntimeError when it does not live and draw all the while."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-gputop-") as folder:
        socket = Path(folder) / "agent.sock"
        with agent(socket, shape), top(socket) as running:
            time.sleep(_WARM_UP_SECONDS)
            running.require_drawn()
            running.drawn.clear()
            watched = psutil.Process(running.process.pid)
            begun, before = time.monotonic(), watched.cpu_times()
            time.sleep(seconds)  # the time that is measured
            running.require_drawn()
            after, elapsed = watched.cpu_times(), time.monotonic() - begun
    return (after.user + after.system - before.user - before.system) / elapsed


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when it takes no more than a thirty-third of a core in what is aimed for."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency.gputop", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="(default %(default)s)")
    options = parser.parse_args(arguments)
    ratio = cpu_ratio(AIMED, options.seconds)
    print(
        f"gputop: {ratio:.1%} of a core at 1 Hz with {_words(AIMED)} (aimed for, up to there: at most {MOST_RATIO:.0%})"
    )
    beyond = cpu_ratio(BEYOND, options.seconds)
    print(f"gputop: {beyond:.1%} of a core at 1 Hz with {_words(BEYOND)} (nothing is aimed for)")
    return 0 if ratio <= MOST_RATIO else 1


def _words(shape: tuple[int, int, int]) -> str:
    devices, containers, processes = shape
    return f"{devices} GPUs, {containers} containers and {processes:,} processes"


if __name__ == "__main__":
    raise SystemExit(main())
