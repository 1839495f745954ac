# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Jobs, from pods as the API server lists them: those that ask for our scheduler and are not placed.

A pod says what it needs in annotations: gpuwarden.io/memory, a quantity as Kubernetes writes it, without which it is no
job; gpuwarden.io/kind, gpuwarden.io/kernel (seconds of its kernels, "2ms") and gpuwarden.io/value, which it may omit.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fleet.model import FleetError, Job

SCHEDULER: Final = "gpuwarden"
_PREFIX: Final = "gpuwarden.io/"
_UNITS: Final = {"": 1, **{letter: 1000 ** (n + 1) for n, letter in enumerate("kMGTPE")}}
_BINARY: Final = {f"{letter}i": 1024 ** (n + 1) for n, letter in enumerate("KMGTPE")}
_LEAST_VALUE, _MOST_VALUE = 1e-3, 1e3
_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Waiting:
    """The jobs of a list of pods."""

    jobs: tuple[Job, ...]
    """The longest waiting first"""
    refused: Counter[str]
    """Reason → pods that ask for our scheduler and cannot be placed"""


def documents(text: str) -> list[Any]:
    """Of the pods in the answer to `kubectl get pods --all-namespaces --output json`."""
    try:
        items = json.loads(text)["items"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FleetError("no list of pods: give the output of `kubectl get pods -A -o json`") from error
    if not isinstance(items, list):
        raise FleetError("no list of pods: its items are no list; give the output of `kubectl get pods -A -o json`")
    return items


def waiting(pods: Iterable[Any]) -> Waiting:
    """Of the pods' documents."""
    jobs, refused = [], Counter[str]()
    for pod in pods:
        if not _waits(pod):
            continue
        job = job_of(pod)
        if isinstance(job, Job):
            jobs.append((str(_part(pod, "metadata").get("creationTimestamp", "")), job))
        else:
            refused[job] += 1
    return Waiting(tuple(job for _, job in sorted(jobs, key=lambda one: (one[0], one[1].key))), refused)


def _part(document: Any, name: str) -> Mapping[str, Any]:
    part = document.get(name) if isinstance(document, dict) else None
    return part if isinstance(part, dict) else {}


def _waits(pod: Any) -> bool:
    spec, metadata = _part(pod, "spec"), _part(pod, "metadata")
    placed = spec.get("nodeName") or metadata.get("deletionTimestamp")
    return spec.get("schedulerName") == SCHEDULER and not placed and _part(pod, "status").get("phase") == "Pending"


def job_of(pod: Any) -> Job | str:
    """The job that a pod of our scheduler is, or why it is none."""
    metadata = _part(pod, "metadata")
    given = {name: str(value) for name, value in _part(metadata, "annotations").items() if name.startswith(_PREFIX)}
    memory_bytes = quantity(given.get(f"{_PREFIX}memory", ""))
    kernel, value = given.get(f"{_PREFIX}kernel"), _value(given.get(f"{_PREFIX}value", "1"))
    kernel_s = None if kernel is None else seconds(kernel)
    if not metadata.get("name") or not memory_bytes:
        return f"no {_PREFIX}memory, such as 20Gi"
    if kernel is not None and kernel_s is None:
        return f"{_PREFIX}kernel is no time, such as 2ms"
    if value is None:
        return f"{_PREFIX}value is no number from 0.001 to 1000"
    key = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
    return Job(key, given.get(f"{_PREFIX}kind") or _owner(metadata), memory_bytes, kernel_s, value)


def _owner(metadata: Mapping[str, Any]) -> str:
    """Pods of one controller are of one kind."""
    owners = metadata.get("ownerReferences")
    given = owners if isinstance(owners, list) else []
    names = [str(one["name"]) for one in given if isinstance(one, dict) and one.get("name")]
    return f"{metadata.get('namespace', 'default')}/{(*names, str(metadata['name']))[0]}"


def quantity(text: str) -> int | None:
    """Bytes, as Kubernetes writes them: 20Gi, 512M; also GiB. None: no such thing."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([kMGTPE]|[KMGTPE]i)?B?", text.strip())
    if not found:
        return None
    return int(float(found[1]) * (_BINARY.get(found[2] or "") or _UNITS[found[2] or ""]))


def seconds(text: str) -> float | None:
    """Of 2ms, 500us, 1.5s. None: no such thing."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(us|µs|ms|s)", text.strip())
    return float(found[1]) * _SECONDS[found[2]] if found else None


def _value(text: str) -> float | None:
    """Values further apart than these would be lost in each other's rounding."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if _LEAST_VALUE <= value <= _MOST_VALUE else None
