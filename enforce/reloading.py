# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy in force, and what takes its place: at SIGHUP, and when the file has changed.

Invariant: a file that is wrong or gone changes nothing that is in force, and the log, the snapshot and the metrics say
so until a right one is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Final, Self

from agent.clock import wall_ns
from agent.errors import PolicyError, WardenError
from agent.pipeline import Pipeline
from enforce.policy.advice import advice
from enforce.policy.file import PolicyFile
from enforce.policy.model import Policy

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 1.0  # between two looks at the file

Start = Callable[[Policy], AbstractContextManager[object]]


class Reloading:
    """A context manager: inside it `policy` is in force. `start` makes what enforces one."""

    def __init__(self, file: PolicyFile, policy: Policy | None, pipeline: Pipeline, start: Start) -> None:
        self._file, self.policy, self._pipeline, self._start = file, policy, pipeline, start
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.policy is None:
            _log.info("no policy: observing only, until there is %s", self._file.path)
        else:
            self._enforce(self.policy)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self) -> None:
        """To be called every LOOK_SECONDS: takes the file once it has changed and is settled."""
        if self._file.changed():
            self._take(even_if_equal=False)

    def reload(self) -> None:
        """Takes the file as it is, and begins anew even where it says what it said before."""
        self._take(even_if_equal=True)

    def _take(self, even_if_equal: bool) -> None:
        try:
            policy = self._file.load()
        except PolicyError as error:
            self._refuse(error)
            return
        if policy == self.policy and not even_if_equal:
            self._pipeline.policy_error = None
            _log.info("the policy file was written anew and says the same: nothing reloaded")
            return
        self._stack.close()
        self.policy, self._pipeline.policy_wall_ns = None, None
        self._pipeline.enforcing, self._pipeline.enforcement, self._pipeline.device_health = False, {}, {}
        try:
            self._enforce(policy)
        except (WardenError, OSError) as error:
            self._pipeline.policy_error = f"nothing is enforced now: {error}"
            _log.error("policy not reloaded, nothing is enforced now; SIGHUP or a changed file tries again: %s", error)
            return
        _log.info("policy reloaded")

    def _refuse(self, error: PolicyError) -> None:
        if self.policy is None and not self._file.exists():
            self._pipeline.policy_error = None
            _log.info("no policy: observing only, not reloaded")
            return
        self._pipeline.policy_error = str(error)
        kept = "the old one stays in force" if self.policy is not None else "nothing is enforced"
        _log.error("policy not reloaded, %s: %s", kept, error)

    def _enforce(self, policy: Policy) -> None:
        for one in advice(policy):
            _log.warning("policy: %s", one.text)
        self._stack.enter_context(self._start(policy))
        self.policy, self._pipeline.policy_wall_ns, self._pipeline.policy_error = policy, wall_ns(), None
