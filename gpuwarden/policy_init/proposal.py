# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container's probable role, and a match for it and its successors. Pure; a guess that the user confirms.

The role is guessed from words in names, image and commands, and from Kubernetes' labels of jobs. Saturating a GPU is no
sign: both roles do.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.core.model import HOST, Container, Snapshot
from agent.core.text import printable
from enforce.policy.findings import container_facts
from enforce.policy.matching import names_of, units_of
from enforce.policy.model import ContainerFacts
from enforce.policy.values import GLOB_MAX

MatchKeys = Mapping[str, str | list[str] | Mapping[str, str]]
"""A match as it is written in the file."""

_ONLINE = (
    *("vllm", "triton", "tritonserver", "sglang", "ollama", "tgi", "torchserve", "llama-server", "text-generation"),
    *("serve", "server", "serving", "inference", "infer", "predict", "api", "chat", "embed", "embeddings", "online"),
)
_OFFLINE = (
    *("train", "trainer", "training", "finetune", "fine-tune", "pretrain", "torchrun", "deepspeed", "accelerate"),
    *("batch", "job", "jobs", "sweep", "offline", "backfill", "preprocess", "eval", "notebook", "jupyter", "render"),
)
_JOB_LABELS = ("batch.kubernetes.io/job-name", "job-name", "training.kubeflow.org/job-name")
# What controllers append: a ReplicaSet's hash and a pod's, a pod's alone, an ordinal.
_SUFFIX = re.compile(r"(?:-[0-9a-f]{6,10}-[bcdfghjklmnpqrstvwxz2456789]{5}|-[bcdfghjklmnpqrstvwxz2456789]{5}|-[0-9]+)$")
_COMPOSE = re.compile(r"[-_][0-9]+$")
_LOGIN_UNITS = ("user@", "session-", "init.scope")  # units of login sessions


@dataclass(frozen=True, slots=True)
class Use:
    """A running container: its share of its GPUs' SM time and its memory on them; None: unknown."""

    facts: ContainerFacts
    sm_ratio: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Containers that one rule would name. `role`: online, offline, or None: left alone."""

    name: str
    match: MatchKeys | None  # None: no pattern can name it; then its role is None, too
    uses: tuple[Use, ...]
    role: str | None
    why: str


def proposals(snapshot: Snapshot) -> list[Proposal]:
    """One for each match, online ones first; one for each container that has none."""
    grouped: dict[tuple[str, str], list[Use]] = {}
    for use in _uses(snapshot):
        match, key = match_of(use.facts.container), use.facts.container.key
        grouped.setdefault((repr(match), key if match is None else ""), []).append(use)
    made = [_proposal(tuple(uses)) for uses in grouped.values()]
    order = {"online": 0, "offline": 1}
    return sorted(made, key=lambda one: (order.get(one.role or "", 2), one.name))


def match_of(container: Container) -> MatchKeys | None:
    """A match for the container and its restarts. None: it has no name, or one too long for a pattern."""
    match = _named(container)
    return match if match is not None and all(len(pattern) <= GLOB_MAX for pattern in match.values()) else None


def _named(container: Container) -> Mapping[str, str] | None:
    if container.namespace and container.pod:
        return {"namespace": glob.escape(container.namespace), "pod": _without(_SUFFIX, container.pod)}
    if container.runtime == "systemd":
        logins = container.name.startswith(_LOGIN_UNITS) or container.name not in units_of(container)
        return None if logins else {"unit": glob.escape(container.name)}
    if container.key == HOST or not names_of(container):
        return None
    return {"container": _without(_COMPOSE, container.name)}


def _without(suffix: re.Pattern[str], name: str) -> str:
    found = suffix.search(name)
    if found is None or not found.start():
        return glob.escape(name)
    return f"{glob.escape(name[: found.start()])}{name[found.start()]}*"


def _uses(snapshot: Snapshot) -> Iterable[Use]:
    for row, facts in zip(snapshot.containers, container_facts(snapshot), strict=False):
        ratios = [one.sm_ratio for one in row.usage if one.sm_ratio is not None]
        sizes = [one.memory_bytes for one in row.usage if one.memory_bytes is not None]
        yield Use(facts, sum(ratios) if ratios else None, sum(sizes) if sizes else None)


def _proposal(uses: tuple[Use, ...]) -> Proposal:
    container = uses[0].facts.container
    match = match_of(container)
    role, why = (None, _unnameable(container)) if match is None else _role(uses[0].facts)
    stem = _SUFFIX.sub("", container.pod) if container.pod else _COMPOSE.sub("", container.name)
    return Proposal(stem or container.name, match, uses, role, why)


def _unnameable(container: Container) -> str:
    if container.key == HOST:
        return "not a container: match its processes by user and command"
    if _named(container) is not None:
        return "its name is too long for a pattern"
    return "a login session" if container.runtime == "systemd" else "its name is not known (yet)"


def _role(facts: ContainerFacts) -> tuple[str | None, str]:
    container = facts.container
    job = next((label for label in _JOB_LABELS if label in container.labels), None)
    if job is not None:
        return "offline", f"label {job}"
    online, offline = (_sign(facts, words) for words in (_ONLINE, _OFFLINE))
    if online and not offline:
        return "online", online
    if offline and not online:
        return "offline", offline
    return None, f"{online}, but {offline}" if online and offline else "no known word in its names"


def _sign(facts: ContainerFacts, words: tuple[str, ...]) -> str | None:
    """The first of these words in the container's names, and where it is."""
    it = facts.container
    places = [("namespace", it.namespace), ("pod", it.pod), ("name", it.name), ("image", it.image)]
    places += [("command", process.command) for process in facts.processes]
    found = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])")
    for where, text in places:
        if text and (word := found.search(text.lower())):
            return f'"{printable(word[0])}" in its {where}'
    return None
