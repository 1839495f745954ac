# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who has which GPU: what the service decided, beside what the API server says of the pods.

Invariant: a GPU that a pod has, or may have, is given to no other pod. A pod has a GPU from the moment at which it is
reserved here until it is deleted or has finished; one that is not bound in RELEASE_S seconds
after the last attempt loses it again.

The annotation is written before the pod is bound, so whatever a killed service left under way is seen by the next one:
a pod that was bound, or still is to be, has its annotation by then. An annotation without a binding counts as a
reservation from the moment at which it is first seen, as clocks of two processes differ.
Pure: a value, and time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

GPU: Final = "gpuwarden.io/gpu"
NODE: Final = "gpuwarden.io/node"
THROUGHPUT: Final = "gpuwarden.io/expected-throughput"
RELEASE_S: Final = 30.0
"""Far longer than any call to the API server is carried out after its client gave up"""


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod, as far as it matters who has which GPU."""

    uid: str
    key: str
    """Namespace/name"""
    gpu: str | None
    """By its annotation"""
    wanted: str | None
    """The node for which the GPU was reserved, by its annotation"""
    node: str | None
    """None: it is not bound"""
    finished: bool


def holder(pod: Any) -> Holder | None:
    """Of a pod's document. None: it is no pod."""
    metadata, spec, status = (_part(pod, name) for name in ("metadata", "spec", "status"))
    uid, name = metadata.get("uid"), metadata.get("name")
    if not uid or not name:
        return None
    annotations = _part(metadata, "annotations")
    return Holder(
        uid=str(uid),
        key=f"{metadata.get('namespace') or 'default'}/{name}",
        gpu=str(annotations.get(GPU) or "") or None,
        wanted=str(annotations.get(NODE) or "") or None,
        node=str(spec.get("nodeName") or "") or None,
        finished=status.get("phase") in ("Succeeded", "Failed"),
    )


def _part(document: Any, name: str) -> Mapping[str, Any]:
    part = document.get(name) if isinstance(document, dict) else None
    return part if isinstance(part, dict) else {}


@dataclass(frozen=True, slots=True)
class Reservation:
    """A GPU for a pod."""

    uid: str
    key: str
    gpu: str
    node: str | None
    """None: an annotation that does not say for which"""
    since_s: float
    bound: bool = False
    ours: bool = True
    """Whether this process made it; else it was seen on the pod"""


class TakenError(Exception):
    """Another pod has the GPU."""


@dataclass(frozen=True, slots=True)
class Reservations:
    """All of them."""

    by_pod: Mapping[str, Reservation] = field(default_factory=lambda: MappingProxyType({}))
    """UID of the pod → what it has"""

    @property
    def gpus(self) -> frozenset[str]:
        """GPUs that a pod has, or may have."""
        return frozenset(one.gpu for one in self.by_pod.values())

    def is_free(self, gpu: str, uid: str = "") -> bool:
        """Whether no pod but this one has it."""
        holders = [one.uid for one in self.by_pod.values() if one.gpu == gpu]
        return holders in ([], [uid])

    def twice(self) -> frozenset[str]:
        """GPUs of two pods: another writer set the annotation, as the service does not."""
        uses = Counter(one.gpu for one in self.by_pod.values())
        return frozenset(gpu for gpu, count in uses.items() if count > 1)

    def reserved(self, wanted: Reservation) -> Reservations:
        """With one more; TakenError where another pod has the GPU, or this pod has another GPU."""
        mine = self.by_pod.get(wanted.uid)
        if not self.is_free(wanted.gpu, wanted.uid) or (mine is not None and mine.gpu != wanted.gpu):
            raise TakenError(wanted.gpu)
        return self._with(wanted)

    def bound(self, uid: str, node: str) -> Reservations:
        """After the API server bound the pod."""
        found = self.by_pod.get(uid)
        return self if found is None else self._with(replace(found, bound=True, node=node))

    def renewed(self, uid: str, now_s: float) -> Reservations:
        """Another attempt to bind it begins, or ended without an answer: it may still be carried out from now on."""
        found = self.by_pod.get(uid)
        return self if found is None or found.bound else self._with(replace(found, since_s=now_s))

    def released(self, uid: str) -> Reservations:
        """After the pod's annotation was taken off, or the pod is gone."""
        return Reservations({key: one for key, one in self.by_pod.items() if key != uid})

    def seen(self, pod: Holder, now_s: float) -> Reservations:
        """After the API server showed the pod: what it says counts, but for what it cannot know yet."""
        old = self.by_pod.get(pod.uid)
        if pod.finished:
            return self if old is None else self.released(pod.uid)
        if pod.gpu is None:
            # ours may be on its way to the API server: it ends by time
            return self if old is None or old.ours else self.released(pod.uid)
        if old is not None and old.gpu == pod.gpu:
            return self.bound(pod.uid, pod.node) if pod.node and not old.bound else self
        if old is not None and old.ours and pod.node is None:
            return self  # an older state of the pod than ours
        node = pod.node or pod.wanted
        return self._with(Reservation(pod.uid, pod.key, pod.gpu, node, now_s, pod.node is not None, ours=False))

    def listed(self, pods: Iterable[Holder], asked_s: float, now_s: float) -> Reservations:
        """After a whole list, asked for at `asked_s`: a pod that is not in it and had a GPU before is gone."""
        found, uids = self, set()
        for pod in pods:
            found = found.seen(pod, now_s)
            uids.add(pod.uid)
        kept = {uid: one for uid, one in found.by_pod.items() if uid in uids or one.since_s >= asked_s}
        return Reservations(kept)

    def expired(self, now_s: float) -> tuple[Reservation, ...]:
        """Not bound in time: to be released, which needs the annotation to be taken off first."""
        return tuple(one for one in self.by_pod.values() if not one.bound and now_s - one.since_s >= RELEASE_S)

    def _with(self, one: Reservation) -> Reservations:
        return Reservations({**self.by_pod, one.uid: one})
