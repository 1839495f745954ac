# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Binding a pod: reserve a GPU, write it on the pod, bind the pod to the node; or undo what was done.

Invariant: the annotation is on the pod before the binding is asked for, and a GPU is free for others only after its
annotation was taken off a pod that is not bound. Each write fails where the pod changed meanwhile, so one that is
carried out late, when another service has bound the pod, changes nothing. So at whatever moment the service is killed,
or the API server stops answering, the next one sees who may have the GPU.

The binding itself could carry annotations in one write. It does not: a binding that is under way while its service is
killed would not be seen by the next one, which would give the GPU away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from fleet.extender.protocol import BindRequest
from fleet.extender.reservations import GPU, NODE, THROUGHPUT, Reservation, TakenError, holder
from fleet.extender.state import Decision, State
from fleet.model import Job
from fleet.sources.kubernetes import ApiError, AwayError, ConflictError, KubernetesApi, MissingError, RefusedError
from fleet.sources.pods import job_of

PLAN: Final = "gpuwarden.io/plan"
HAMI: Final = "nvidia.com/use-gpuuuid"
_WRITTEN: Final = (GPU, NODE, THROUGHPUT)
"""Taken off again; PLAN stays: which plan it was is no claim on a GPU"""


class Delivery(StrEnum):
    """How the GPU gets into the container."""

    GPUWARDEN = "gpuwarden"
    """The pod's own variable NVIDIA_VISIBLE_DEVICES reads the annotation"""
    HAMI = "hami"
    """HAMi reads its annotation too"""


class Outcome(StrEnum):
    """Of one request to bind, as the metric counts them."""

    BOUND = "bound"
    TAKEN = "taken"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Bound:
    """What became of a request."""

    outcome: Outcome
    error: str = ""
    decision: Decision | None = None
    job: Job | None = None


class Binder:
    """Called from many threads."""

    def __init__(
        self, api: KubernetesApi, state: State, delivery: Delivery, done: Callable[[BindRequest, Bound], None]
    ):
        self._api, self._state, self._delivery, self._done = api, state, delivery, done

    def bind(self, asked: BindRequest) -> str:
        """Why it failed; empty: the pod is bound. The same request again gives the same GPU."""
        found = self._bind(asked)
        self._done(asked, found)
        return found.error

    def _bind(self, asked: BindRequest) -> Bound:
        try:
            job = self._state.job(asked.uid) or self._job(asked)
            decision = self._state.begin(asked.uid, asked.key, job, asked.node)
        except TakenError as error:
            return Bound(Outcome.TAKEN, str(error))
        except ApiError as error:
            return Bound(Outcome.FAILED, str(error))
        bound, release, result = None, False, Bound(Outcome.UNKNOWN, "the request ended early", decision, job)
        try:
            result = self._carry_out(asked, decision, job)
            bound = asked.node if result.outcome is Outcome.BOUND else None
            release = result.outcome is Outcome.FAILED
        finally:
            self._state.end(asked.uid, bound, release)
        return result

    def _job(self, asked: BindRequest) -> Job:
        """Of a pod that the watch has not brought yet."""
        pod = self._api.pod(asked.namespace, asked.name)
        seen, job = holder(pod), job_of(pod)
        if seen is None or seen.uid != asked.uid:
            raise TakenError(f"{asked.key} is another pod by now")
        if seen.finished:
            raise TakenError(f"{asked.key} has ended")
        if not isinstance(job, Job):
            raise TakenError(f"{asked.key} asks for no GPU in a way that can be read: {job}")
        return job

    def _carry_out(self, asked: BindRequest, decision: Decision, job: Job) -> Bound:
        try:
            self._annotate(asked, decision)
        except RefusedError as error:  # nothing was written now, and before only where this is a repetition
            first = decision.candidate is not None or isinstance(error, MissingError)
            return Bound(Outcome.FAILED if first else Outcome.UNKNOWN, str(error), decision, job)
        except AwayError as error:
            return Bound(Outcome.UNKNOWN, str(error), decision, job)
        try:
            self._api.bind(asked.namespace, asked.name, asked.uid, asked.node)
        except ApiError as error:
            return self._after_failure(asked, (decision, job), error)
        return Bound(Outcome.BOUND, "", decision, job)

    def _annotate(self, asked: BindRequest, decision: Decision) -> None:
        """On the pod as it is known: a call of a service that was killed, which comes later, finds another version."""
        pod = self._state.pod(asked.uid) or self._api.pod(asked.namespace, asked.name)
        annotations = self._annotations(asked, decision)
        try:
            self._write(asked.key, asked.uid, pod, annotations)
        except ConflictError:
            pod = self._api.pod(asked.namespace, asked.name)  # some other part of it may have changed
            seen, gpu = holder(pod), decision.reservation.gpu
            if seen is None or (seen.gpu != gpu and (seen.gpu or seen.node)):
                raise
            self._write(asked.key, asked.uid, pod, annotations)

    def _write(self, key: str, uid: str, pod: Mapping[str, Any], annotations: Mapping[str, str | None]) -> None:
        """Fails where the pod is another version by now."""
        version = str(pod["metadata"].get("resourceVersion", ""))
        namespace, _, name = key.partition("/")
        self._api.annotate(namespace, name, {"uid": uid, "resourceVersion": version, "annotations": annotations})

    def _annotations(self, asked: BindRequest, decision: Decision) -> dict[str, str]:
        gpu = decision.reservation.gpu
        found = {GPU: gpu, NODE: asked.node, PLAN: decision.plan}
        if decision.candidate is not None:
            found[THROUGHPUT] = f"{decision.candidate.throughput:.2f}"
        return {**found, HAMI: gpu} if self._delivery is Delivery.HAMI else found

    def _after_failure(self, asked: BindRequest, what: tuple[Decision, Job], error: ApiError) -> Bound:
        """Bound all the same (the answer was lost, or it was a repetition); or not, then the annotation goes."""
        decision, job = what
        try:
            pod = self._api.pod(asked.namespace, asked.name)
            seen = holder(pod)
            if seen is None or seen.uid != asked.uid:
                return Bound(Outcome.FAILED, f"{asked.key} is another pod by now", decision, job)
            if seen.node == asked.node and seen.gpu == decision.reservation.gpu:
                return Bound(Outcome.BOUND, "", decision, job)
            if isinstance(error, AwayError):
                return Bound(Outcome.UNKNOWN, str(error), decision, job)  # it may still be bound
            self._take_off(decision.reservation, pod)
        except MissingError:
            return Bound(Outcome.FAILED, f"{asked.key} is deleted", decision, job)
        except ApiError as second:
            return Bound(Outcome.UNKNOWN, f"{error}; {second}", decision, job)
        return Bound(Outcome.FAILED, str(error), decision, job)

    def release_expired(self) -> int:
        """Takes GPUs from pods that were not bound in time. How many; the rest is tried again."""
        return sum(self._released(one) for one in self._state.expired())

    def _released(self, one: Reservation) -> bool:
        namespace, _, name = one.key.partition("/")
        bound: str | None = None
        try:
            pod = self._api.pod(namespace, name)
            seen = holder(pod)
            if seen is not None and seen.uid == one.uid and seen.node and seen.gpu == one.gpu:
                bound = seen.node  # the watch is late
            elif seen is not None and seen.uid == one.uid and seen.gpu == one.gpu:
                self._take_off(one, pod)
        except MissingError:
            pass
        except ApiError:
            return False
        self._state.end(one.uid, bound, bound is None)
        return bound is None

    def _take_off(self, one: Reservation, pod: Mapping[str, Any]) -> None:
        """Fails where the pod is another version by now: it may be bound."""
        names = (*_WRITTEN, HAMI) if self._delivery is Delivery.HAMI else _WRITTEN
        self._write(one.key, one.uid, pod, dict.fromkeys(names))
