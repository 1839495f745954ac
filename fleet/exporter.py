# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The service's own metrics.

Invariant: what is unknown has no series. A family is set as a whole, so that what is no more is not shown on.
"""

from __future__ import annotations

import threading
from collections import Counter as Count
from collections.abc import Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from fleet.learning import Lessons
from fleet.match.plan import Plan
from fleet.sources.prometheus import Found

_PREFIX: Final = "gpuwarden_fleet_"
_REQUEST_S: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_ERRORS: Final = (-0.5, -0.3, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.3, 0.5)
_WAIT_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


_Labels = TypeVar("_Labels", bound=tuple[str, ...])


class Metrics:
    """Set from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """No scrape sees a family that is half set"""
        self.registry = CollectorRegistry()
        gauge, counter = self._gauge, self._counter
        self._slots = gauge("slots", "GPUs that have room for an offline job, by use in the plan", "model", "state")
        self._unknown = gauge("unknown_slots", "GPUs that are no slots, by reason", "reason")
        self._jobs = gauge("jobs", "Offline pods that are not finished", "state")
        self._longest = gauge("longest_wait_seconds", "Of the pods that wait now, since the first of them was made")
        self._refused = gauge(
            "refused_pods", "Pods that ask for the scheduler and cannot be placed, by reason", "reason"
        )
        later = self._unregistered
        self._value = later("plan_value", "Expected throughput of all pairs, weighted by the jobs' values")
        self._bound = later("plan_bound", "No plan is worth more")
        self._gap = later("plan_gap_ratio", "At most this part of the optimum is missed")
        self._made = later("plan_timestamp_seconds", "When the last plan was made")
        self._of_a_plan = [self._value, self._bound, self._gap, self._made]
        """Registered when there is one: a gauge without labels is 0 from the beginning"""
        self._gain = gauge("plan_gain_ratio", "Value of the plan to that of another way of placing", "over")
        self._duration = gauge("plan_duration_seconds", "Of the last plan", "step")
        self._types = gauge("types", "Types in the plan", "side")
        self._twice = gauge("gpus_of_two_pods", "GPUs that two pods have by their annotations: another writer's doing")
        self._failures = counter("plan_failures", "Plans that could not be made")
        self._requests = counter("extender_requests", "Requests of the scheduler", "verb", "outcome")
        self._binds = counter("binds", "Requests to bind a pod", "outcome")
        self._released = counter("released", "Reservations that were not bound in time")
        self._dropped = counter("notices_dropped", "Events and marks on pods that were not written")
        self._seconds = self._histogram("extender_duration_seconds", "Of a request", _REQUEST_S, "verb")
        self._measured = gauge("measured_pairs", "Pairs of an online and an offline kind with a measured throughput")
        self._penalised = gauge("penalised_pairs", "Pairs that are worth half, as their online side missed its promise")
        self._errors = self._histogram(
            "prediction_error_ratio", "Throughput that was expected of a pod less what it got, to alone", _ERRORS
        )
        self._unread = counter("learning_failures", "Plans before which a window of figures could not be read")
        self._waited = self._histogram("wait_seconds", "From a pod's creation to its binding", _WAIT_S)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self.registry)

    def _unregistered(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, registry=None)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

    def plan(self, plan: Plan, found: Found, seconds: Mapping[str, float], now_s: float) -> None:
        """After a plan was made. `seconds`: step → how long it took; `now_s`: since 1970."""
        used = {one.slot.gpu for one in plan.placed}
        slots = Count((slot.model, "planned" if slot.gpu in used else "spare") for slot in plan.slots)
        gains = {(name,): gain for name in plan.baselines if (gain := plan.gain(name)) is not None}
        with self._lock:
            _set(self._slots, slots)
            _set(self._unknown, {(reason,): count for reason, count in found.unknown.items()})
            self._value.set(plan.value)
            self._bound.set(plan.bound)
            self._gap.set(plan.gap_ratio)
            _set(self._gain, gains)
            _set(self._duration, {(step,): one for step, one in seconds.items()})
            _set(self._types, {("slots",): len(plan.slot_types), ("jobs",): len(plan.job_types)})
            self._made.set(now_s)
            while self._of_a_plan:
                self.registry.register(self._of_a_plan.pop())

    def pods(self, jobs: Mapping[str, int], refused: Mapping[str, int], twice: int, longest_s: float) -> None:
        """State or reason → pods. `longest_s`: that one waits; 0 where none does."""
        with self._lock:
            _set(self._jobs, {(state,): count for state, count in jobs.items()})
            _set(self._refused, {(reason,): count for reason, count in refused.items()})
            self._twice.set(twice)
            self._longest.set(longest_s)

    def learned(self, lessons: Lessons) -> None:
        """After a plan was made."""
        self._measured.set(lessons.measured)
        self._penalised.set(lessons.penalised)
        for error in lessons.errors:
            self._errors.observe(error)
        if lessons.failure is not None:
            self._unread.inc()

    def plan_failed(self) -> None:
        self._failures.inc()

    def request(self, verb: str, outcome: str, seconds: float) -> None:
        self._requests.labels(verb, outcome).inc()
        self._seconds.labels(verb).observe(seconds)

    def bind(self, outcome: str, waited_s: float | None) -> None:
        """`waited_s`: of a pod that was bound, as far as it is known."""
        self._binds.labels(outcome).inc()
        if waited_s is not None:
            self._waited.observe(max(0.0, waited_s))

    def released(self, count: int) -> None:
        self._released.inc(count)

    def dropped(self) -> None:
        self._dropped.inc()

    def families(self) -> tuple[Metric, ...]:
        """All that there may be, whether they have a value yet or not."""
        with self._lock:
            later = [family for gauge in self._of_a_plan for family in gauge.collect()]
            return (*self.registry.collect(), *later)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        with self._lock:
            return generate_latest(self.registry)


def _set(family: Gauge, values: Mapping[_Labels, float]) -> None:
    family.clear()
    for labels, value in values.items():
        family.labels(*labels).set(value)
