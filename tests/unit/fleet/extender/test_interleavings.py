# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""No GPU has two pods, in whatever order pods are filtered and bound, calls fail, watches lag and services are killed.

The real State and Binder on an API server in memory. A binding's calls fail before or after they are carried out, other
bindings come between them, and a killed service leaves what it had written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet.api_server import Cluster, RefusedError
from fleet.extender.answers import Board
from fleet.extender.bind import Binder, Delivery
from fleet.extender.protocol import BindRequest, Question, filter_result, prioritize_result
from fleet.extender.reservations import GPU, RELEASE_S
from fleet.extender.state import State
from fleet.match.plan import solve
from fleet.model import Slot
from fleet.sources.kubernetes import AwayError, ConflictError, KubernetesApi, MissingError
from fleet.weights.physical import Physical

GIB = 1 << 30
NODES = ("n0", "n1")
SLOTS = [Slot(node, f"GPU-{node}-{at}", "H200", None, 0.0, 1.0, 1.0, 40 * GIB, None) for node in NODES for at in (0, 1)]
ASKS = {"gpuwarden.io/memory": "8Gi", "gpuwarden.io/kind": "etl", "gpuwarden.io/kernel": "1ms"}


class KilledError(BaseException):
    """The service is killed at this moment."""


@dataclass
class Api:
    """Calls straight to the cluster. `plan`: what happens at each further call of a service."""

    cluster: Cluster
    faults: list[str] = field(default_factory=list)
    between: Callable[[], object] | None = None
    late: list[Callable[[], Any]] = field(default_factory=list)
    """Calls that the server carries out after the client gave up, or was killed"""

    def pod(self, namespace: str, name: str) -> Any:
        return self._call(lambda: self.cluster.get(f"{namespace}/{name}"))

    def annotate(self, namespace: str, name: str, metadata: Mapping[str, Any]) -> Any:
        return self._call(lambda: self.cluster.patch(f"{namespace}/{name}", metadata))

    def bind(self, namespace: str, name: str, uid: str, node: str) -> None:
        self._call(lambda: self.cluster.bind(f"{namespace}/{name}", uid, node))

    def _call(self, carry_out: Callable[[], Any]) -> Any:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "killed before":
            raise KilledError
        if fault in ("killed, carried out later", "away, carried out later"):
            self.late.append(carry_out)
            raise KilledError if fault.startswith("killed") else AwayError("away")
        if fault == "away before":
            raise AwayError("away")
        if fault == "another between" and self.between is not None:
            between, self.between = self.between, None
            between()
        try:
            answer = carry_out()
        except RefusedError as error:
            raise (MissingError if error.status == 404 else ConflictError)(str(error)) from error
        if fault == "killed after":
            raise KilledError
        if fault == "away after":
            raise AwayError("away")
        return answer


class World:
    """A cluster, and the service that runs at the moment."""

    def __init__(self) -> None:
        self.cluster, self.now_s, self.names = Cluster(), 0.0, 0
        self.api = Api(self.cluster)
        self.start()

    def start(self) -> None:
        """A service that knows nothing: what the one before left is in the cluster."""
        self.api.faults = []
        self.state = State(lambda: self.now_s, 1e9)
        api: KubernetesApi = self.api  # type: ignore[assignment]
        self.binder = Binder(api, self.state, Delivery.GPUWARDEN, lambda *_: None)
        self.state.listed(list(self.cluster.pods.values()), self.now_s)
        self.seen = self.cluster.version
        self.plan()

    def plan(self) -> None:
        demand = self.state.demand()
        free = [slot for slot in SLOTS if slot.gpu not in demand.held]
        board = Board.of(solve(free, demand.waiting.jobs, Physical()), Physical())
        self.state.adopt(board, demand, "plan")

    def create(self) -> None:
        self.names += 1
        self.cluster.add(f"p{self.names}", ASKS)

    def deliver(self, count: int) -> None:
        """The watch brings so many changes."""
        for version, kind, pod in [one for one in self.cluster.log if one[0] > self.seen][:count]:
            self.state.changed(kind, pod)
            self.seen = version

    def schedule(self, at: int, faults: list[str], other: int) -> None:
        """Filter and bind, as kube-scheduler does for a pod that is not bound as far as it knows."""
        self.api.faults = list(faults)
        self.api.between = lambda: self._schedule(other)
        try:
            self._schedule(at)
        except KilledError:
            self.start()
        self.api.faults, self.api.between = [], None

    def _schedule(self, at: int) -> None:
        pods = list(self.cluster.pods.values())
        if not pods:
            return
        pod = pods[at % len(pods)]
        asked = Question(pod, NODES)
        nodes = filter_result(self.state.view(), asked)["NodeNames"]
        if not nodes:
            return
        scores = prioritize_result(self.state.view(), Question(pod, tuple(nodes)))
        best = max(scores, key=lambda one: (one["Score"], one["Host"]))
        metadata = pod["metadata"]
        self.binder.bind(BindRequest(metadata["namespace"], metadata["name"], metadata["uid"], best["Host"]))

    def finish(self, at: int) -> None:
        bound = [key for key, pod in self.cluster.pods.items() if pod["spec"].get("nodeName")]
        if bound:
            self.cluster.set_phase(bound[at % len(bound)], "Succeeded")

    def delete(self, at: int) -> None:
        if self.cluster.pods:
            self.cluster.delete(list(self.cluster.pods)[at % len(self.cluster.pods)])

    def carry_out(self) -> None:
        """What is late, within the limit that each call carries."""
        late, self.api.late = self.api.late, []
        for call in late:
            with suppress(RefusedError):
                call()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if seconds > 5:  # far over that limit
            self.api.late = []
        self.binder.release_expired()

    def check(self) -> None:
        assert self.cluster.doubles == []
        for key, pod in self.cluster.pods.items():
            node = pod["spec"].get("nodeName")
            if node:
                assert pod["metadata"]["annotations"].get(GPU, "").startswith(f"GPU-{node}-"), key


FAULTS = st.lists(
    st.sampled_from(
        [
            "",
            "another between",
            "away before",
            "away after",
            "away, carried out later",
            "killed before",
            "killed after",
            "killed, carried out later",
        ]
    ),
    max_size=4,
)
PLACE = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("create")),
    st.tuples(st.just("schedule"), PLACE, FAULTS, PLACE),
    st.tuples(st.just("schedule"), PLACE, FAULTS, PLACE),
    st.tuples(st.just("deliver"), st.integers(1, 4)),
    st.tuples(st.just("carry_out")),
    st.tuples(st.just("plan")),
    st.tuples(st.just("start")),
    st.tuples(st.just("finish"), PLACE),
    st.tuples(st.just("delete"), PLACE),
    st.tuples(st.just("wait"), st.sampled_from([1.0, RELEASE_S])),
)


@given(st.lists(STEPS, max_size=30))
@settings(max_examples=150)
def test_no_gpu_has_two_pods_in_any_interleaving(steps: list[tuple[Any, ...]]) -> None:
    world = World()
    for _ in range(4):
        world.create()
    world.deliver(99)
    world.plan()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
        world.check()


def test_a_pod_that_has_ended_keeps_its_annotation_whoever_asks_to_bind_it_again() -> None:
    world = World()
    for _ in range(4):
        world.create()
    world.deliver(99)
    world.plan()
    world.schedule(3, [], 0)
    world.schedule(0, ["killed after"], 0)
    world.finish(0)
    world.deliver(1)
    world.schedule(3, [], 0)
    world.check()


@given(FAULTS)
@settings(max_examples=40)
def test_after_any_fault_the_pod_is_bound_once_the_service_is_well_again(faults: list[str]) -> None:
    world = World()
    world.create()
    world.deliver(9)
    world.plan()
    world.schedule(0, faults, 0)
    for _ in range(3):
        world.wait(RELEASE_S)
        world.deliver(9)
        world.plan()
        world.schedule(0, [], 0)
    world.check()
    (pod,) = world.cluster.pods.values()
    assert pod["spec"].get("nodeName")


def test_the_same_request_again_gives_the_same_gpu() -> None:
    world = World()
    world.create()
    world.deliver(9)
    world.plan()
    (pod,) = world.cluster.pods.values()
    request = BindRequest("batch", "p1", pod["metadata"]["uid"], "n1")
    assert world.binder.bind(request) == ""
    first = world.cluster.get("batch/p1")["metadata"]["annotations"][GPU]
    assert world.binder.bind(request) == ""
    assert world.cluster.get("batch/p1")["metadata"]["annotations"][GPU] == first


def test_where_the_binding_is_refused_the_annotation_is_taken_off_and_the_gpu_is_free() -> None:
    world = World()
    world.create()
    world.deliver(9)
    world.plan()
    (pod,) = world.cluster.pods.values()
    uid = pod["metadata"]["uid"]
    world.api.between = lambda: world.cluster.bind("batch/p1", uid, "elsewhere")
    world.api.faults = ["", "another between"]
    assert "already assigned" in world.binder.bind(BindRequest("batch", "p1", uid, "n1"))
    assert GPU not in world.cluster.get("batch/p1")["metadata"]["annotations"]
    assert world.state.view().reservations.gpus == frozenset()


def test_an_annotation_that_is_carried_out_after_its_service_was_killed_changes_no_pod_that_is_bound() -> None:
    world = World()
    for _ in range(4):
        world.create()
    world.deliver(99)
    world.plan()
    world.schedule(0, ["killed, carried out later"], 0)
    world.schedule(1, [], 0)
    world.schedule(0, [], 0)
    world.carry_out()
    world.check()


def test_what_else_changes_on_a_pod_does_not_keep_it_from_being_bound() -> None:
    world = World()
    world.create()
    world.deliver(9)
    world.plan()
    world.cluster.patch("batch/p1", {"annotations": {"seen": "by another controller"}})
    world.schedule(0, [], 0)
    assert world.cluster.get("batch/p1")["spec"].get("nodeName")


def test_a_binding_that_is_carried_out_after_its_service_was_killed_has_its_gpu_alone() -> None:
    world = World()
    for _ in range(5):
        world.create()
    world.deliver(9)
    world.plan()
    world.schedule(0, ["", "killed, carried out later"], 0)
    for at in range(1, 5):
        world.plan()
        world.schedule(at, [], 0)
    world.carry_out()
    world.check()
    assert len(world.cluster.by_gpu) == 4
