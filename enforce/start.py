# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcing half of the agent, put together on top of an observer."""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

from agent import layout
from agent.collectors.deliveries import Deliveries
from agent.errors import SetupError
from agent.model import ContainerKey, ProcessId
from agent.observer import Observer
from enforce.actuators.evict import Evict
from enforce.actuators.freeze import Freeze
from enforce.actuators.pace import Pace
from enforce.climber import Climber
from enforce.decisions import DecisionLog
from enforce.gates import GateReader
from enforce.histogram import Counts
from enforce.holds import Holds
from enforce.ledger import Ledger
from enforce.loop import Loop
from enforce.model import Rung
from enforce.mps_clients import AnyMps
from enforce.policy.model import Policy
from enforce.release import release_all
from enforce.report import PauseMeter
from enforce.rungs import Rungs
from enforce.signals.gpu_wait import GpuWait, ReadHistogram
from enforce.supervisor import Supervisor

_log = logging.getLogger(__name__)


class Enforcement:
    """A context manager: inside it the loop decides, and acts if the policy says `enforce: true`."""

    def __init__(self, policy: Policy, observer: Observer, run_dir: Path, decisions: str) -> None:
        self._policy, self._observer = policy, observer
        self._ledger_path = run_dir / "ledger.jsonl"
        self._decisions = decisions
        self._ending = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        left_over = release_all(self._ledger_path)
        if left_over:
            _log.warning("released %d processes that an earlier agent left", len(left_over))
        with ExitStack() as stack:
            supervisor, holds, rungs = None, None, None
            freeze = Freeze(self._observer.proc, self._others)
            stack.callback(freeze.close)
            table: dict[str, Rung] = {
                rung.name: rung for rung in (freeze, Evict(self._observer.proc, AnyMps(self._observer.proc)))
            }
            if self._policy.enforce:
                ledger = Ledger(self._ledger_path)
                stack.callback(ledger.close)
                supervisor = Supervisor(self._observer.probes, self._ledger_path, self._policy.tuning)
                supervisor.start()
                stack.callback(supervisor.stop)
                holds = Holds(Pace(self._observer.probes.map("rules")), ledger, self._observer.proc)
                rungs = Rungs(table, ledger)
            log = DecisionLog(self._decisions)
            stack.callback(log.close)
            loop = self._loop(log, holds, supervisor, Climber(table, rungs))
            thread = threading.Thread(target=loop.run, args=(self._ending,), name="enforce", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._ending.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _others(self, container: ContainerKey) -> frozenset[int]:
        """The processes on a GPU that are in other containers."""
        members = self._observer.members.all()
        return frozenset(member.process.id.tgid for member in members if member.container.key != container)

    def _loop(self, log: DecisionLog, holds: Holds | None, supervisor: Supervisor | None, climber: Climber) -> Loop:
        observer, probes = self._observer, self._observer.probes
        observer.pipeline.enforcing = supervisor is not None
        return Loop(
            policy=self._policy,
            pipeline=observer.pipeline,
            members=observer.members,
            signals={"gpu_wait": GpuWait(_histograms(observer))},
            deliveries=Deliveries(probes),
            holds=holds,
            supervisor=supervisor,
            log=log,
            meter=PauseMeter(probes.map("paces"), probes.map("resumes")),
            climber=climber,
            gates=GateReader(probes.map("gates").share(layout.SLOTS), self._policy.tuning.gate_hold_ns),
        )


def _histograms(observer: Observer) -> ReadHistogram:
    """A reader of one process's cumulative latency histogram."""
    latencies = observer.probes.map("latencies")

    def read(process: ProcessId) -> Counts | None:
        found = latencies.get(layout.ProcessKey.of(process))
        return tuple(found.buckets) if found is not None else None

    return read


def plan(policy: Policy, observer: Observer, run_dir: Path, seconds: float) -> int:
    """Watches for a while, then prints what would be done: one line of JSON per container."""
    with Enforcement(replace(policy, enforce=False), observer, run_dir, decisions=""):
        time.sleep(seconds)
        snapshot = observer.snapshot()
    if snapshot is None:
        raise SetupError("nothing was observed in that time: give more --seconds")
    for row in snapshot.containers:
        stance = observer.pipeline.enforcement.get(row.container.key)
        if stance is not None:
            print(json.dumps({"container": row.container.name, "key": row.container.key, **asdict(stance)}))
    return 0
