# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the service knows at the moment: pods, who has which GPU, the plan, and why nothing new is placed.

Invariant: each method is one step under one lock, which no call to a server is made under; so of two pods that want one
GPU at once, one gets it. All of it can be rebuilt: pods come from the API server, the plan from what Prometheus says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleet.extender.answers import Board, Candidate, choose
from fleet.extender.protocol import View
from fleet.extender.reservations import THROUGHPUT, Holder, Reservation, Reservations, TakenError, holder
from fleet.model import Job
from fleet.sources.pods import Waiting, job_of, waiting
from fleet.sources.windows import Running

_KEPT: Final = {
    "metadata": (
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "creationTimestamp",
        "deletionTimestamp",
        "annotations",
        "ownerReferences",
    ),
    "spec": ("schedulerName", "nodeName"),
    "status": ("phase",),
}
"""Of a pod's document: the rest is most of its size"""
_REMEMBERED_S: Final = 1800.0
"""How long a pod that is gone is remembered, with what it did"""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a plan is made for."""

    waiting: Waiting
    held: frozenset[str]
    """GPUs that are no slots"""
    running: Mapping[str, Running]
    """Namespace/name → pod that has a GPU, or had one until lately"""


@dataclass(frozen=True, slots=True)
class Decision:
    """A GPU for a pod that is to be bound."""

    reservation: Reservation
    candidate: Candidate | None
    """None: the pod had the reservation already"""
    plan: str
    online: str | None = None


class State:
    """Shared by the watch, the planner and the extender's requests."""

    def __init__(self, clock: Callable[[], float], oldest_plan_s: float) -> None:
        self._clock, self._oldest_plan_s = clock, oldest_plan_s
        self._lock = threading.Lock()
        self._pods: dict[str, Any] = {}
        self._reservations = Reservations()
        self._board: Board | None = None
        self._plan, self._planned_s = "", clock()
        self._troubles: dict[str, str] = {"kubernetes": "the pods were not listed yet", "plan": "there is no plan yet"}
        self._binding: set[str] = set()
        self._refused: set[str] = set()
        self._gone: dict[str, tuple[float, Running]] = {}
        """Namespace/name → when, and the pod"""
        self._changed_s: float | None = None

    def listed(self, pods: Iterable[Any], asked_s: float) -> None:
        """All pods there are."""
        kept, failed = {}, set()
        for pod in pods:
            uid = str(pod["metadata"].get("uid"))
            kept[uid] = _slim(pod)
            if _has_failed(pod):
                failed.add(uid)
        with self._lock:
            before = self._waiting_keys()
            for uid in self._pods.keys() - kept.keys():
                self._remember(uid)
            self._pods = kept
            self._refused = failed | (self._refused & kept.keys())
            holders = [found for one in kept.values() if (found := holder(one)) is not None]
            self._reservations = self._reservations.listed(holders, asked_s, self._clock())
            self._troubles.pop("kubernetes", None)
            if self._waiting_keys() != before:
                self._changed_s = self._clock()

    def changed(self, kind: str, pod: Any) -> None:
        """One pod. `kind`: ADDED, MODIFIED or DELETED."""
        slim = _slim(pod)
        seen = holder(slim)
        if seen is None:
            return
        with self._lock:
            waited = _is_waiting(self._pods.get(seen.uid))
            if kind == "DELETED":
                self._remember(seen.uid)
                self._pods.pop(seen.uid, None)
                self._reservations = self._reservations.released(seen.uid)
            else:
                self._pods[seen.uid] = slim
                if _has_failed(pod):
                    self._refused.add(seen.uid)
                self._reservations = self._reservations.seen(seen, self._clock())
            if waited != _is_waiting(self._pods.get(seen.uid)) and seen.uid not in self._reservations.by_pod:
                self._changed_s = self._clock()

    def trouble(self, source: str, reason: str | None) -> None:
        """Why nothing new is placed; None: that is over."""
        with self._lock:
            if reason is None:
                self._troubles.pop(source, None)
            else:
                self._troubles[source] = reason

    def knows_pods(self) -> bool:
        """Whether they are known as they are at the moment."""
        with self._lock:
            return "kubernetes" not in self._troubles

    def changed_s(self) -> float | None:
        """When the set of waiting pods changed first since the last plan."""
        with self._lock:
            return self._changed_s

    def demand(self) -> Demand:
        """For the next plan."""
        with self._lock:
            self._changed_s = None
            oldest_s = self._clock() - _REMEMBERED_S
            self._gone = {key: one for key, one in self._gone.items() if one[0] > oldest_s}
            reservations, pods, gone = self._reservations, list(self._pods.items()), dict(self._gone)
        free = [pod for uid, pod in pods if uid not in reservations.by_pod]
        there = (_running(pod) for uid, pod in pods if uid in reservations.by_pod)
        running = {key: one for key, (_, one) in gone.items()} | {one.job.key: one for one in there if one is not None}
        return Demand(waiting(free), reservations.gpus, running)

    def refused(self, uid: str) -> None:
        """The scheduler was given no node for the pod, and may not ask again for minutes."""
        with self._lock:
            if uid in self._pods:
                self._refused.add(uid)

    def to_wake(self, keys: frozenset[str]) -> tuple[Holder, ...]:
        """Of these waiting pods, those that were refused since they were last woken."""
        with self._lock:
            known = [holder(self._pods.get(uid)) for uid in self._refused]
            found = tuple(one for one in known if one is not None and one.key in keys and one.node is None)
            gone = self._refused - self._pods.keys()
            self._refused -= gone | {one.uid for one in found}
        return found

    def adopt(self, board: Board, demand: Demand, plan: str) -> None:
        """A new plan, made for `demand`."""
        with self._lock:
            given = {
                one.gpu: self._job(one.uid) for one in self._reservations.by_pod.values() if one.gpu not in demand.held
            }
            self._board = board.caught_up(given)
            self._plan, self._planned_s = plan, self._clock()
            self._troubles.pop("plan", None)

    def view(self) -> View:
        """For answers."""
        with self._lock:
            return View(self._board, self._reservations, self._refusal())

    def job(self, uid: str) -> Job | None:
        """None: the pod is unknown yet, or is no job."""
        with self._lock:
            return self._job(uid)

    def pod(self, uid: str) -> Any:
        """What is kept of its document; None: unknown."""
        with self._lock:
            return self._pods.get(uid)

    def pods(self) -> Mapping[str, Any]:
        """UID → what is kept of the document."""
        with self._lock:
            return dict(self._pods)

    def begin(self, uid: str, key: str, job: Job, node: str) -> Decision:
        """Reserves a GPU of the node. TakenError: there is none for the pod, with the reason. `end` has to follow."""
        with self._lock:
            if uid in self._binding:
                raise TakenError(f"{key} is being bound already")
            decision = self._decide(uid, key, job, node)
            self._binding.add(uid)
            return decision

    def end(self, uid: str, bound: str | None, release: bool) -> None:
        """Of a binding. `bound`: the node to which the pod is bound. Neither: unknown, time will tell."""
        with self._lock:
            self._binding.discard(uid)
            if bound is not None:
                self._reservations = self._reservations.bound(uid, bound)
            elif release:
                self._reservations = self._reservations.released(uid)
                self._changed_s = self._clock()
            else:
                self._reservations = self._reservations.renewed(uid, self._clock())

    def expired(self) -> tuple[Reservation, ...]:
        """To be released, unless they are being bound at the moment."""
        with self._lock:
            return tuple(one for one in self._reservations.expired(self._clock()) if one.uid not in self._binding)

    def _decide(self, uid: str, key: str, job: Job, node: str) -> Decision:
        mine, board, seen = self._reservations.by_pod.get(uid), self._board, holder(self._pods.get(uid))
        if seen is not None and seen.finished:  # bound since who asks last saw it
            raise TakenError(f"{key} has ended")
        if mine is not None:
            if mine.node != node:
                raise TakenError(f"{key} has {mine.gpu} on {mine.node or 'another node'} reserved")
            if not self._reservations.is_free(mine.gpu, uid):
                raise TakenError(f"{mine.gpu} has another pod: {key} waits until its reservation is released")
            self._reservations = self._reservations.renewed(uid, self._clock())
            return Decision(mine, None, self._plan)
        if reason := self._refusal():
            raise TakenError(reason)
        if board is None or (candidate := choose(board, job, node)) is None:
            raise TakenError(f"{node} has no GPU for {key} any more")
        wanted = Reservation(uid, key, candidate.gpu, node, self._clock())
        self._reservations = self._reservations.reserved(wanted)
        self._board = board.booked(candidate, job)
        online = {slot.gpu: slot.online for slot in board.plan.slots if slot.node == node}
        return Decision(wanted, candidate, self._plan, online.get(candidate.gpu))

    def _refusal(self) -> str | None:
        age_s = self._clock() - self._planned_s
        if self._troubles:
            return f"nothing new is placed: {'; '.join(self._troubles.values())}"
        if age_s > self._oldest_plan_s:
            return f"nothing new is placed: the plan is {age_s:.0f} s old"
        return None

    def _job(self, uid: str) -> Job | None:
        pod = self._pods.get(uid)
        job = None if pod is None else job_of(pod)
        return job if isinstance(job, Job) else None

    def _remember(self, uid: str) -> None:
        """A pod that is going, if it has a GPU."""
        found = _running(self._pods.get(uid)) if uid in self._reservations.by_pod else None
        if found is not None:
            self._gone[found.job.key] = self._clock(), found

    def _waiting_keys(self) -> set[str]:
        return {uid for uid, pod in self._pods.items() if _is_waiting(pod)}


def _running(pod: Any) -> Running | None:
    """None: no job."""
    job = None if pod is None else job_of(pod)
    if not isinstance(job, Job):
        return None
    expected = (pod["metadata"].get("annotations") or {}).get(THROUGHPUT)
    try:
        return Running(job, None if expected is None else float(expected))
    except ValueError:
        return Running(job, None)


def _slim(pod: Any) -> Any:
    found: dict[str, Any] = {}
    for part, names in _KEPT.items():
        whole = pod.get(part) if isinstance(pod, dict) else None
        found[part] = {name: whole[name] for name in names if name in whole} if isinstance(whole, dict) else {}
    return found


def _has_failed(pod: Any) -> bool:
    """Whether the scheduler says that it has no node for the waiting pod, or that asking failed.

    It may not try again for minutes. An answer of ours that refuses a pod is known sooner; but it may have asked while
    no service ran.
    """
    status = pod.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    found = any(
        isinstance(one, dict) and one.get("type") == "PodScheduled" and one.get("status") == "False"
        for one in (conditions if isinstance(conditions, list) else ())
    )
    return found and _is_waiting(pod)


def _is_waiting(pod: Any) -> bool:
    if pod is None:
        return False
    return bool(waiting([pod]).jobs)
