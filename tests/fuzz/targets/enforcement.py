# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What decisions are made of, and what they leave: MPS daemons, pages of metrics, the ledger, decision logs, usage."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError, WardenError
from agent.core.model import ProcessId
from agent.exporters.usage.query import By
from agent.exporters.usage.query import read as read_usage
from agent.node.http_client import FetchError
from enforce.actuators.freezer.cgroup import FreezerCgroup
from enforce.actuators.mps.channel import MAX_OUTPUT_BYTES, CommandAnswer, MpsChannel
from enforce.actuators.mps.model import Daemon, MpsControl, MpsError
from enforce.actuators.mps.protocol3 import connect_over
from enforce.actuators.mps.restore import from_place
from enforce.audit import log_reader
from enforce.ledger.entries import MAX_LINE_BYTES, Replay, intend_line
from enforce.policy.model import PrometheusSource, Slo
from enforce.signals.prometheus import LatencyHistory
from enforce.signals.scraper import Scrape, histograms
from gpuwarden import explain, report
from tests.fuzz.target import SEPARATOR, Target, answers, require

_DAEMON: Final = Daemon(ProcessId(7, 7), "/tmp/nvidia-mps", "/bin/false")
_MOST_COMMANDS: Final = 4096
_NOW_NS: Final = 1_800_000_000_000_000_000
_HOUR_S: Final = 1_800_000_000


class _StubChannel(MpsChannel):
    """A daemon that answers with the parts of an input, those that begin with "!" as failures."""

    __slots__ = ("_following", "_left")
    _following: Callable[[], bytes]
    _left: int

    @classmethod
    def of(cls, data: bytes) -> _StubChannel:
        """The daemon."""
        made = cls(_DAEMON)
        object.__setattr__(made, "_following", answers(data))
        object.__setattr__(made, "_left", _MOST_COMMANDS)
        return made

    def ask(self, arguments: Sequence[str] = (), given: str = "") -> CommandAnswer:
        """The next part."""
        object.__setattr__(self, "_left", self._left - 1)
        require(self._left > 0, "commands to a daemon without end")
        text = self._following().decode("utf-8", "replace")
        return CommandAnswer(not text.startswith("!"), text.removeprefix("!"))


def mps(data: bytes) -> None:
    """A session with an MPS daemon, in the protocol that it seems to know."""
    try:
        control = connect_over(_StubChannel.of(data))
    except MpsError:
        return
    for step in (_survey, _limit, _end):
        with suppress(MpsError):
            step(control)


def _survey(control: MpsControl) -> None:
    tgids = [client.tgid for client in control.clients()]
    tgids += [server.tgid for server in control.servers() if server.tgid is not None]
    require(all(0 <= tgid < 1 << 34 for tgid in tgids), "a process that cannot be")
    control.devices()
    control.device_clients()


def _limit(control: MpsControl) -> None:
    ordinals = tuple(control.devices().values())[:4]
    for scope in control.scopes()[:4]:
        for settings in control.settings(scope, ordinals).values():
            for setting in settings:
                with suppress(MpsError):
                    require(len(control.get(setting)) < 100, "a limit as long as the daemon likes")
                    control.put(setting, "100" if setting.what == "percentage" else "1")


def _end(control: MpsControl) -> None:
    for client in control.clients()[:1]:
        control.terminate(client)
    for server in control.servers()[:1]:
        control.shut_down(server)


_SOURCE: Final = PrometheusSource("http://test/metrics", "seconds", (("model", ("a*", "b")),))
_SLO: Final = Slo("prometheus", 0.99, 50_000_000, 60 * NS_PER_SECOND, 1, _SOURCE)


def exposition(data: bytes) -> None:
    """A tenant's pages of metrics, one after the other: a latency, no page of which costs more than it may."""
    history = LatencyHistory(_SLO, _SOURCE.unit_ns)
    for index, page in enumerate(data.split(SEPARATOR)[:4]):
        at_ns = (index + 1) * NS_PER_SECOND
        try:
            scrape = Scrape(at_ns, histograms(page.decode("utf-8", "replace"), _SOURCE))
        except FetchError as error:
            scrape = Scrape(at_ns, {}, str(error))
        if not scrape.series and scrape.failure is None:
            scrape = Scrape(at_ns, {}, "absent")
        reading = history.read(scrape, at_ns)
        require(reading is None or reading.latency_ns is None or math.isfinite(reading.latency_ns), "no latency")
        require(history.slow() >= 0, "less than no slow request")


def ledger(data: bytes) -> None:
    """A ledger: what is outstanding can be written again, found, and undone."""
    replay = Replay()
    replay.add(data.split(b"\n"))
    require(replay.dead >= 0, "more outstanding than written")
    again = Replay()
    again.add(line for entry in replay.outstanding.values() for line in intend_line(entry).splitlines())
    for entry in replay.outstanding.values():
        if len(intend_line(entry)) <= MAX_LINE_BYTES:
            require(again.outstanding.get(entry.id) == entry, "written again an entry is another")
        require(b"\0" not in os.fsencode(entry.place), "a place that no call takes")
        with suppress(WardenError):
            from_place(entry.place)
        with suppress(WardenError):
            FreezerCgroup.parse(entry.place)


def decision_log(data: bytes) -> None:
    """A decision log, and the explanation of every container in it."""
    with _file(data) as path:
        history, bad = log_reader.read(path, _NOW_NS)
    require(0 <= bad <= data.count(b"\n") + 1, "more bad lines than lines")
    for container in history.explain().containers:
        found = history.explain(container.key)
        if found.story is not None:
            explain.show(found, found.story, 0, io.StringIO())


def usage(data: bytes) -> None:
    """A usage ledger: the report, by everything."""
    by = list(By)
    with _file(data) as path:
        try:
            found = read_usage(path, 0, 2 * _HOUR_S, by)
        except SetupError:
            return
    lines = list(found.rows.items())
    report.document(found, by, lines, None)
    report.show(found, report.columns(by), lines, None, io.StringIO())


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    """A file that holds the input."""
    path = _folder() / "input"
    path.write_bytes(data)
    yield path


@cache
def _folder() -> Path:
    """A folder in memory, of this process."""
    path = Path("/dev/shm") / f"gpuwarden-fuzz-{os.getpid()}"
    path.mkdir(exist_ok=True)
    return path


TARGETS: Final = {
    "mps": Target("answers of MPS daemons", mps, MAX_OUTPUT_BYTES),
    "exposition": Target("pages of metrics", exposition, 4 << 20),
    "ledger": Target("ledgers", ledger, 1 << 20),
    "decision_log": Target("decision logs", decision_log, 64 << 10),
    "usage": Target("usage ledgers", usage),
}
