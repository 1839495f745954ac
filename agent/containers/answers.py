# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a runtime says about a container, made fit to be kept and shown.

Invariant: whatever a container calls itself, what is kept is printable and at most ~28 KiB, and neither its key nor
anything else that its cgroup tells changes. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model import Container
from agent.names import printable

CONTAINER_NAME = "io.kubernetes.container.name"  # the labels that the kubelet gives, to the runtime, each container
POD_NAME = "io.kubernetes.pod.name"
POD_NAMESPACE = "io.kubernetes.pod.namespace"
_OURS = "gpuwarden.io/"  # of a pod's annotations, these are kept
_KUBELETS = "io.kubernetes."
_MOST_ANNOTATIONS = 16
_MOST_LABELS, _LONGEST_LABEL, _MOST_LABEL_CHARACTERS = 64, 256, 16_384
LONGEST_NAME = 253  # of a pod; Docker's and Podman's have no limit of their own


@dataclass(frozen=True, slots=True)
class Names:
    """How people call a container. Empty and None: the runtime does not say."""

    name: str = ""
    pod: str | None = None
    namespace: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def bounded(said: Names) -> Names:
    """The same within our limits, as text that cannot harm who reads it."""
    return Names(
        printable(said.name, LONGEST_NAME),
        _text(said.pod, LONGEST_NAME),
        _text(said.namespace, LONGEST_NAME),
        _text(said.image, _LONGEST_LABEL),
        _labels(said.labels),
        _labels({key: value for key, value in said.annotations.items() if key.startswith(_OURS)}, _MOST_ANNOTATIONS),
    )


def own_labels(said: Mapping[str, str]) -> dict[str, str]:
    """Of a container in no pod: who may start one may give it any label, but not pass it off as a pod's."""
    return {key: value for key, value in said.items() if not key.startswith(_KUBELETS)}


def applied(names: Names, container: Container) -> Container:
    """The container under its names. Its cgroup has the last word on the labels that it gave."""
    return dataclasses.replace(
        container,
        name=names.name or container.name,
        pod=names.pod,
        namespace=names.namespace,
        image=names.image,
        labels={**names.labels, **container.labels},
        annotations=names.annotations,
    )


def _text(said: str | None, longest: int) -> str | None:
    return printable(said, longest) if said else None


def _labels(said: Mapping[str, str], most: int = _MOST_LABELS) -> dict[str, str]:
    """The first of them by name: the same ones each time. A name that is too long is no name; a value is cut."""
    kept: dict[str, str] = {}
    left = _MOST_LABEL_CHARACTERS
    for key in sorted(said):
        if not key or len(key) > _LONGEST_LABEL:
            continue
        name, value = printable(key), printable(said[key], _LONGEST_LABEL)
        left -= len(name) + len(value)
        if left < 0 or len(kept) >= most:
            break
        kept[name] = value
    return kept
