# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What people write: policies, web configurations, and the annotations of their pods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agent.config.yaml_source import Problem
from agent.containers.identity import Names, applied, bounded
from agent.core.model import Container, ContainerKey
from agent.exporters.web import schema
from enforce.policy.annotations import classified
from enforce.policy.findings import findings, plain
from enforce.policy.load import check_text, parse
from enforce.policy.matching import ContainerFacts
from enforce.policy.model import Role
from tests.fuzz.target import Target, require

_EVERYBODY: Final = """
version: 1
annotations: {online: ["*"], offline: ["*"]}
"""
_LARGEST_FILE: Final = 64 << 10


def policy(data: bytes) -> None:
    """A policy file that is UTF-8: a policy or its mistakes, and the report of `gpuwarden check` about it."""
    text = _text(data)
    if text is None:
        return
    checked = check_text(text, "policy.yaml")
    require((checked.value is None) == bool(checked.problems), "neither a policy nor a mistake, or both")
    _require_places(checked.problems, text)
    report = plain(checked, findings(checked))
    require(all(character.isprintable() for character in report.replace("\n", "")), "the report moves the cursor")
    if checked.value is not None:
        checked.value.classify(_facts(Names(pod="p", namespace="default")))


def web_config(data: bytes) -> None:
    """A web configuration, but for the certificates that it names."""
    text = _text(data)
    if text is None:
        return
    section, source, problems = schema.FORMAT.parse(text)
    if section is not None:
        problems += schema.entries(section, source)
    _require_places(problems, text)


def pod_annotations(data: bytes) -> None:
    """A pod's annotations, a line KEY=VALUE each, in a namespace that may declare anything."""
    text = _text(data) or ""
    given = dict(line.partition("=")[::2] for line in text.split("\n"))
    found = classified(_POLICY, _facts(Names(pod="p", namespace="default", annotations=given)))
    require((found.role is Role.UNMATCHED) == (found.rule is None), "a role without a rule, or a rule without a role")
    require(len(found.reason) < 4096, "the reason is as long as the pod likes")


def _text(data: bytes) -> str | None:
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def _require_places(problems: Iterable[Problem], text: str) -> None:
    lines = text.count("\n") + 1
    for problem in problems:
        place = problem.place
        require(1 <= place.line <= lines and place.column >= 1 and place.width >= 0, "a mistake outside of the file")


def _facts(names: Names) -> ContainerFacts:
    container = Container(ContainerKey("containerd:a"), "c", "containerd", "a" * 64, cgroup="/kubepods/a")
    return ContainerFacts(applied(bounded(names), container))


_POLICY: Final = parse(_EVERYBODY, "policy.yaml")

TARGETS: Final = {
    "policy": Target("policies", policy, _LARGEST_FILE),
    "web_config": Target("web configurations", web_config, _LARGEST_FILE),
    "annotations": Target("annotations of pods", pod_annotations),
}
