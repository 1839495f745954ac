# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The history out of a decision log, for when no agent runs that could be asked.

A log holds less: only what changed, and an online container only while something was held for it. Lines that are not of
a decision log (torn, of another program) are counted and skipped; lines of an older version lack some fields, no more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from agent.core.errors import SetupError
from enforce.audit.decision_log import MOST_FILE_BYTES, DecisionRecord, OfQuantile
from enforce.audit.history import DecisionHistory
from enforce.audit.intervals import KEPT_NS
from enforce.audit.model import ContainerInfo, DecisionEffect

_NAMES = {field.name for field in fields(DecisionRecord)}
_NUMBERS = ("latency_ns", "slack_ratio", "share_before", "max_queued_before_ns")  # or null


def read(path: Path, now_ns: int) -> tuple[DecisionHistory, int]:
    """The last hour before `now_ns` (CLOCK_REALTIME) in the log and its predecessor; the number of bad lines."""
    history, bad = DecisionHistory(now=lambda: (now_ns, 0)), 0
    containers: dict[str, ContainerInfo] = {}
    before: dict[tuple[str, int], DecisionRecord] = {}  # what an effect refers to
    for line in _lines(path):
        record = _record(line)
        wall_ns = record.get("wall_ns")
        if not isinstance(wall_ns, int) or not now_ns - 2 * KEPT_NS <= wall_ns <= now_ns:
            bad += not isinstance(wall_ns, int)
            continue
        try:
            _add(record, history, containers, before)
        except (
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
        ):  # OverflowError: JSON has numbers that no int or float is
            bad += 1
    history.update_containers(containers.values(), now_ns)
    history.end(min((wall_ns for _, wall_ns in before), default=now_ns), now_ns)
    history.has_policy = bool(containers)
    return history, bad


def _add(
    record: dict[str, Any],
    history: DecisionHistory,
    containers: dict[str, ContainerInfo],
    before: dict[tuple[str, int], DecisionRecord],
) -> None:
    if record.get("kind", "decision") == "effect":
        container, at_ns = str(record["container"]), int(record["decision_wall_ns"])
        was = before.get((container, at_ns))
        latency, slack = (None, None) if was is None else (was.latency_ns, was.slack_ratio)
        now, slack_now = _number(record["latency_ns"]), _number(record["slack_ratio"])
        history.record_effect(
            container, DecisionEffect(at_ns, int(record["window_ns"]), latency, now, slack, slack_now)
        )
        return
    decision = _decision(record)
    before[decision.container, decision.wall_ns] = decision
    name, rule = decision.name or decision.container, decision.rule
    containers[decision.container] = ContainerInfo(
        decision.container, name, decision.pod, decision.namespace, role="offline", rule=rule
    )
    history.record_decision(decision, decision.wall_ns)
    history.enforcing = decision.acted
    if decision.ruler:
        containers.setdefault(decision.ruler, ContainerInfo(decision.ruler, decision.ruler_name, role="online"))
        history.record_ruler(decision, decision.wall_ns)


def _decision(record: dict[str, Any]) -> DecisionRecord:
    given = {name: value for name, value in record.items() if name in _NAMES}
    given["rungs"] = tuple(str(rung) for rung in given.get("rungs", ()))
    for name in ("wall_ns", "target_ns", "max_queued_ns", "pauses"):
        given[name] = int(given.get(name, 0))
    for name in ("share_after", "quantile", "paused_seconds"):
        given[name] = float(given.get(name, 0.0))
    for name in _NUMBERS:
        given[name] = _number(given.get(name))
    for name in ("container", "device", "rule", "law", "reason"):
        given[name] = str(given[name])
    given["troubles"] = dict(given.get("troubles", {}))
    given["other"] = _other(other) if isinstance(other := given.get("other"), dict) else None
    return DecisionRecord(**given)


def _other(record: dict[str, Any]) -> OfQuantile:
    return OfQuantile(
        float(record["quantile"]),
        _number(record["latency_ns"]),
        int(record["target_ns"]),
        _number(record["slack_ratio"]),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _record(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}


def _lines(path: Path) -> Iterator[bytes]:
    found = False
    for one in (path.with_name(f"{path.name}.1"), path):
        try:
            with open(one, "rb", opener=_opener) as file:
                found = True
                yield from filter(None, file.read(MOST_FILE_BYTES * 4).split(b"\n"))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise SetupError(
                f"cannot read {one} ({error.strerror}): name a file that `run --decisions` wrote"
            ) from error
    if not found:
        raise SetupError(f"there is no {path}: name a file that `run --decisions` wrote")


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
