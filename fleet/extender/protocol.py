# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The extender's protocol: what kube-scheduler asks in JSON, and what it is answered.

Names are capitalised, as the Go structs of k8s.io/kube-scheduler/extender/v1 have no tags. Invariant: of the nodes that
were asked about each is in one of NodeNames and FailedNodes. A pod that no node can take at the moment is also in
FailedAndUnresolvableNodes, so that no other pod is evicted for it; schedulers that do not know that field read
FailedNodes, which kube-scheduler writes into the pod's events. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleet.extender.answers import MOST_SCORE, Board, Filtered, filter_nodes, prioritize
from fleet.extender.reservations import Reservations, holder
from fleet.model import FleetError, Job
from fleet.sources.pods import job_of

_HOW: Final = "configure the extender with nodeCacheCapable: true"


@dataclass(frozen=True, slots=True)
class View:
    """What an answer depends on."""

    board: Board | None
    reservations: Reservations
    refusal: str | None
    """Why nothing new is placed"""


@dataclass(frozen=True, slots=True)
class Question:
    """About a pod and some nodes."""

    pod: Any
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BindRequest:
    """What is to be bound where."""

    namespace: str
    name: str
    uid: str
    node: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def question(document: Any) -> Question:
    """Of ExtenderArgs."""
    given = _object(document, "ExtenderArgs")
    pod, names = given.get("Pod"), given.get("NodeNames")
    if not isinstance(pod, dict):
        raise FleetError("ExtenderArgs needs the object Pod")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FleetError(f"ExtenderArgs needs NodeNames, a list of names: {_HOW}")
    return Question(pod, tuple(names))


def bind_request(document: Any) -> BindRequest:
    """Of ExtenderBindingArgs."""
    given = _object(document, "ExtenderBindingArgs")
    names = ("PodNamespace", "PodName", "PodUID", "Node")
    values = [given.get(name) for name in names]
    wrong = [name for name, value in zip(names, values, strict=True) if not isinstance(value, str) or not value]
    if wrong:
        raise FleetError(f"ExtenderBindingArgs needs {', '.join(wrong)}, as text that is not empty")
    return BindRequest(*map(str, values))


def filter_result(view: View, asked: Question) -> dict[str, Any]:
    """ExtenderFilterResult."""
    found = filtered(view, asked)
    if isinstance(found, str):
        refused = dict.fromkeys(asked.nodes, found)
        return _result((), refused, refused)
    return _result(found.nodes, found.refused, {})


def filtered(view: View, asked: Question) -> Filtered | str:
    """Or why no node is right at the moment."""
    if view.refusal is not None or view.board is None:
        return view.refusal or "nothing new is placed: there is no plan yet"
    job = job_of(asked.pod)
    if not isinstance(job, Job):
        return f"the pod asks for no GPU in a way that can be read: {job}"
    if (place := _reserved(view, asked.pod)) is None:
        return filter_nodes(view.board, job, asked.nodes)
    gpu, node = place
    nodes = tuple(name for name in asked.nodes if name == node)
    reason = f"the pod has {gpu} on {node or 'another node'} reserved"
    return Filtered(nodes, {name: reason for name in asked.nodes if name != node})


def prioritize_result(view: View, asked: Question) -> list[dict[str, Any]]:
    """HostPriorityList."""
    job = job_of(asked.pod)
    place = _reserved(view, asked.pod)
    if view.board is None or not isinstance(job, Job):
        scores: Mapping[str, int] = {}
    elif place is not None:
        scores = {node: MOST_SCORE for node in asked.nodes if node == place[1]}
    else:
        scores = prioritize(view.board, job, asked.nodes)
    return [{"Host": node, "Score": scores.get(node, 0)} for node in asked.nodes]


def bind_result(error: str) -> dict[str, str]:
    """ExtenderBindingResult; no error: it is bound."""
    return {"Error": error}


def _result(nodes: Sequence[str], refused: Mapping[str, str], unresolvable: Mapping[str, str]) -> dict[str, Any]:
    return {
        "Nodes": None,
        "NodeNames": list(nodes),
        "FailedNodes": dict(refused),
        "FailedAndUnresolvableNodes": dict(unresolvable),
        "Error": "",
    }


def _reserved(view: View, pod: Any) -> tuple[str, str | None] | None:
    """GPU and node that the pod has already."""
    seen = holder(pod)
    found = None if seen is None else view.reservations.by_pod.get(seen.uid)
    return None if found is None else (found.gpu, found.node)


def _object(document: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise FleetError(f"the body is no JSON object: {what} is one")
    return document
