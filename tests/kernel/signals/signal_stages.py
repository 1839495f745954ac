# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One stage for each signal: containers whose processes answer a known number of requests, and how long each took.

A new signal is a class and a line in STAGES; test_signals.py then holds it to what all signals promise.
"""

from __future__ import annotations

import http.client
import math
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from agent.core.clock import monotonic_ns
from agent.core.model import Container, ContainerKey, ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs
from enforce.model import Reading, Signal
from enforce.policy.model import HttpSource, PrometheusSource, Slo, Source, UprobeSource
from enforce.signals import latency_window
from enforce.signals.http import Http, request_follower
from enforce.signals.prometheus import Prometheus
from enforce.signals.registry import GpuWait
from enforce.signals.scraper import Scraper
from enforce.signals.uprobe import Uprobe, UprobeProbes
from tests.support.kernel_records import Recorded
from tests.support.programs.timed import OBJECT, Took, compile_timed, follows, snapshot_of, start
from tools.harness.wait import until

MS = 1_000_000
_PAGE_EACH_NS = 50 * MS

Answer = Callable[[int, int], list[Took]]
"""So many requests of about so many ms: what each took, at least and at most"""


@dataclass(slots=True)
class Service:
    """One process of a container."""

    process: ProcessId
    answer: Answer
    end: Callable[[], None]


class Stage(ABC):
    """What a signal is tried on."""

    signal: Signal

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.members: dict[ContainerKey, set[ProcessId]] = {}

    @abstractmethod
    def source(self, container: ContainerKey) -> Source | None:
        """The source in the container's SLO."""

    @abstractmethod
    def start(self, container: ContainerKey) -> Service:
        """A process; from now on its requests count."""

    def slo(self, container: ContainerKey, window_ns: int, min_samples: int) -> Slo:
        """Of the median."""
        return Slo(self.signal.name, 0.5, 50 * MS, window_ns, min_samples, self.source(container))

    def read(self, container: ContainerKey, slo: Slo) -> Reading | None:
        """As the loop does."""
        return self.signal.read(snapshot_of(self.members), container, slo, monotonic_ns())

    def of(self, container: Container) -> set[int]:
        """Plays the containers' cgroups, for signals that ask for the processes in them."""
        return {process.tgid for process in self.members.get(container.key, ()) if Procfs().is_alive(process)}

    def forget(self, container: ContainerKey) -> None:  # noqa: B027  # nothing is kept, which is no omission
        """Plays them too."""


class GpuWaits(Stage):
    """The kernel's histograms are played; that the probes fill them so is for test_waits.py to show."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self._recorded: dict[ProcessId, Recorded] = {}
        self.signal = GpuWait(self._histogram, latency_window.Requests())

    def _histogram(self, process: ProcessId) -> bytes | None:
        return self._recorded[process].buckets if process in self._recorded else None

    def source(self, container: ContainerKey) -> None:
        return None

    def start(self, container: ContainerKey) -> Service:
        process = ProcessId(len(self._recorded) + 1_000_000, 1)
        recorded = self._recorded[process] = Recorded()
        self.members.setdefault(container, set()).add(process)
        self.read(container, self.slo(container, 60_000 * MS, 1))

        def answer(count: int, ms: int) -> list[Took]:
            recorded.add([ms * MS] * count)
            return [(ms * MS, ms * MS)] * count

        return Service(process, answer, lambda: self.members[container].discard(process))


class Functions(Stage):
    """Real programs, real uprobes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self._program = compile_timed(folder)
        self._uprobe = stack.enter_context(
            closing(Uprobe(lambda: UprobeProbes(OBJECT, Procfs()), self, Procfs(), latency_window.Requests()))
        )
        self.signal = self._uprobe

    def source(self, container: ContainerKey) -> UprobeSource:
        return UprobeSource(str(self._program), symbol="handle_request")

    def start(self, container: ContainerKey) -> Service:
        mine = self.stack.enter_context(ExitStack())
        program = mine.enter_context(start(self._program))
        self.members.setdefault(container, set()).add(program.process)
        self.read(container, self.slo(container, 60_000 * MS, 1))
        self._uprobe.follower.wake()
        until(lambda: follows(self._uprobe.follower, program.process), "the probe on the program")
        return Service(program.process, lambda count, ms: program.do("call", count, ms * 1000), mine.close)


class Pages(Stage):
    """A real page of metrics; the service counts with the library that most services count with."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        self._registry = CollectorRegistry()
        bounds = [0.0005 * 1.02**step for step in range(400)]
        self._histogram = Histogram(
            "request_seconds", "Requests.", ["container", "process"], buckets=bounds, registry=self._registry
        )
        self._url = _serve(lambda: generate_latest(self._registry), stack)
        prometheus = Prometheus(latency_window.Requests(), lambda url: Scraper(url, each_ns=_PAGE_EACH_NS))
        self._prometheus = self.signal = stack.enter_context(closing(prometheus))
        self._started = 0
        self._free: dict[ContainerKey, list[int]] = {}  # what restarts has the same labels, and counts from 0

    def source(self, container: ContainerKey) -> PrometheusSource:
        return PrometheusSource(self._url, "request_seconds", (("container", (str(container),)),))

    def start(self, container: ContainerKey) -> Service:
        free = self._free.setdefault(container, [])
        if not free:
            self._started += 1
            free.append(self._started)
        number = free.pop()
        series = self._histogram.labels(str(container), str(number))
        process = ProcessId(number + 1_000_000, 1)
        self.members.setdefault(container, set()).add(process)
        self.read(container, self.slo(container, 60_000 * MS, 1))
        until(lambda: self._shows_nothing_of(container, number), "a page with the process")

        def answer(count: int, ms: int) -> list[Took]:
            for _ in range(count):
                series.observe(ms / 1000)
            return [(ms * MS, ms * MS)] * count

        def end() -> None:
            free.append(number)
            self._histogram.remove(str(container), str(number))

        return Service(process, answer, end)

    def _shows_nothing_of(self, container: ContainerKey, number: int) -> bool:
        """Whether the page as it is known has that process, with no request yet."""
        key = (("container", str(container)), ("process", str(number)))
        latest = self._prometheus._scrapers[self._url].latest(self.source(container), monotonic_ns())
        self.read(container, self.slo(container, 60_000 * MS, 1))
        return latest is not None and latest.series.get(key, {}).get(math.inf) == 0


class Requests(Stage):
    """Real servers, real system calls. Processes of one container share its port, so either may answer."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        follower = request_follower(Procfs(), lambda: preflight.bpf_object().with_name("http.bpf.o"))
        follower._processes = self
        self._follower = stack.enter_context(closing(follower))
        self.signal = Http(follower, latency_window.Requests(), [])
        self._ports: dict[ContainerKey, int] = {}

    def source(self, container: ContainerKey) -> HttpSource:
        if container not in self._ports:
            kept = self.stack.enter_context(socket.socket())  # bound and not listening: no other program gets the port
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            kept.bind(("127.0.0.1", 0))
            self._ports[container] = kept.getsockname()[1]
        return HttpSource(self._ports[container])

    def start(self, container: ContainerKey) -> Service:
        port = self.source(container).port
        mine = self.stack.enter_context(ExitStack())
        server = subprocess.Popen([sys.executable, "-c", _SERVER, str(port)], stdout=subprocess.PIPE)
        mine.callback(server.wait)
        mine.callback(server.kill)
        assert server.stdout
        mine.callback(server.stdout.close)
        assert server.stdout.readline() == b"ready\n"
        process = Procfs().process_id(server.pid)
        self.members.setdefault(container, set()).add(process)
        until(lambda: self._counts(container, process), "the server to be followed")
        return Service(process, lambda count, ms: _ask(port, count, ms), mine.close)

    def _counts(self, container: ContainerKey, process: ProcessId) -> bool:
        self.read(container, self.slo(container, 60_000 * MS, 1))
        self._follower.wake()
        return follows(self._follower, process)


_SERVER = """
import socket, sys, time
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen()
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    while request := connection.recv(4096):
        began = time.monotonic_ns()
        time.sleep(int(request.split(b"/")[1].split()[0]) / 1000)
        body = b"%d" % (time.monotonic_ns() - began)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
    connection.close()
"""


def _ask(port: int, count: int, ms: int) -> list[Took]:
    took = []
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.connect()
        for _ in range(count):
            began_ns = monotonic_ns()
            connection.request("GET", f"/{ms}")
            within_ns = int(connection.getresponse().read())
            took.append((within_ns, monotonic_ns() - began_ns))
    return took


def _serve(page: Callable[[], bytes], stack: ExitStack) -> str:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            body = page()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_address[1]}/metrics"


STAGES: Mapping[str, Callable[[Path, ExitStack], Stage]] = {
    "gpu_wait": GpuWaits,
    "http": Requests,
    "prometheus": Pages,
    "uprobe": Functions,
}
