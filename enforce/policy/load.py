# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A policy file, read and judged in one go: a Policy, or every mistake in it.

The file is looked at through the descriptor that is read, so what was judged is what is used. Bounded: 1 MiB.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from agent import trusted, yaml_source
from agent.errors import PolicyError
from agent.yaml_source import Place, Problem, Source
from enforce.policy import convert
from enforce.policy.complaints import complaints
from enforce.policy.crosschecks import crosschecks
from enforce.policy.model import Policy
from enforce.policy.schema import PolicySection

MAX_BYTES = 1 << 20
EMPTY = "the policy is empty; write version: 1 and the rules (docs/policy.md has examples)"


@dataclass(frozen=True, slots=True)
class Judged:
    """A text that may be a policy: the policy, or what is wrong, in file order. `read` knows where everything is.

    `was_read`: false where the file could not be. `exposed`: who besides its owner could change it, and so what the
    agent does.
    """

    name: str
    text: str
    problems: tuple[Problem, ...]
    policy: Policy | None = None
    read: Source = field(default_factory=Source)
    was_read: bool = True
    exposed: str | None = None

    def accepted(self) -> Policy:
        """The policy. Raises PolicyError with all mistakes."""
        if self.policy is None:
            raise PolicyError([f"{self.name}:{problem.place.line}: {problem.text}" for problem in self.problems])
        return self.policy


def load(path: str | os.PathLike[str], strict_permissions: bool = False) -> Policy:
    """The policy in a file. Raises PolicyError. `strict_permissions` (the agent) refuses one others can write."""
    return examine(path, strict_permissions).accepted()


def parse(text: str, name: str) -> Policy:
    """The policy in a text; messages call it `name`. Raises PolicyError with all mistakes, in file order."""
    return judge(text, name).accepted()


def examine(path: str | os.PathLike[str], strict_permissions: bool = False) -> Judged:
    """What is in a file. Never raises: that it cannot be read is a mistake too."""
    name = os.fspath(path)
    try:
        raw, status = _read(name)
        exposed = trusted.exposed(name, status)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return _unfit(name, f"cannot be read ({reason}); check the path and its permissions", was_read=False)
    if not stat.S_ISREG(status.st_mode):
        return _unfit(name, "is not a regular file; name the policy's YAML file")
    if exposed and strict_permissions:
        return _unfit(name, exposed)
    if len(raw) > MAX_BYTES:
        return _unfit(name, "is larger than 1 MiB; check that this is a policy")
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return _unfit(name, "is not UTF-8 text; save the file as UTF-8", line)
    return replace(judge(text, name), exposed=exposed)


def judge(text: str, name: str) -> Judged:
    """What is in a text; messages call it `name`."""
    read = yaml_source.read(text)
    problems = list(read.problems)
    section = None
    if read.data is not None:
        try:
            section = PolicySection.model_validate(read.data)
        except ValidationError as error:
            problems += complaints(error.errors(include_url=False), read)
        problems += crosschecks(read)
    elif not problems:
        problems.append(Problem(Place(), EMPTY))
    policy = convert.policy(section) if section is not None and not problems else None
    return Judged(name, text, tuple(sorted(problems)), policy, read)


def _unfit(name: str, problem: str, line: int = 1, was_read: bool = True) -> Judged:
    return Judged(name, "", (Problem(Place(line), problem),), was_read=was_read)


def _read(name: str) -> tuple[bytes, os.stat_result]:
    return trusted.read(name, MAX_BYTES)
