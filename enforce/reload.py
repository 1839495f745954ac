# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy in force, and its replacement: at SIGHUP, and when the file has changed.

Invariant: a file that is wrong or gone changes nothing that is in force, and the log, the snapshot and the metrics say
so until it is right. A client that requests a reload over the agent's socket gets its outcome.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Self

from agent.config.validation import WatchedFile, check_apart, unchanged_since_last_look
from agent.core.clock import wall_ns
from agent.core.errors import PolicyError, SetupError, WardenError
from agent.pipeline import EnforcementReport, Pipeline, PolicyStatus
from enforce.policy.findings import advice, findings, plain, summary
from enforce.policy.model import Policy

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 1.0  # between two looks at the file
PolicyFile = WatchedFile[Policy]
Start = Callable[[Policy], AbstractContextManager[object]]


def policy_file(path: Path) -> PolicyFile:
    """The policy file of the agent, which refuses one that others can write. Looked at every LOOK_SECONDS."""
    check = partial(check_apart, "enforce.policy.load", refusal=PolicyError)
    return WatchedFile(path, check, unchanged_since_last_look)


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """The outcome of reading the policy file: lines for people, and the exit code of the command that requested it."""

    text: str
    exit_code: int = 0


class ReloadRequests:
    """Requests for a reload, from any thread, until the thread that reloads answers them; `wake` wakes that one."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._mutex = threading.Lock()
        self._waiting: list[Callable[[ReloadOutcome], None]] = []

    def order(self, reply: Callable[[ReloadOutcome], None]) -> None:
        """Queues a request; `reply` is called with the outcome, on the thread that reloads."""
        with self._mutex:
            self._waiting.append(reply)
        self._wake()

    def carry_out(self, reload: Callable[[], ReloadOutcome]) -> None:
        """Reloads and answers. A request that comes in meanwhile waits for the next call: the file may be newer."""
        with self._mutex:
            waiting, self._waiting = self._waiting, []
        outcome = reload()
        for reply in waiting:
            reply(outcome)


class PolicyReloader:
    """A context manager: inside it `policy` is in force. `start` makes the context manager that enforces a policy."""

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
        """To be called every LOOK_SECONDS: applies the file once it has changed and is settled."""
        if self._file.changed():
            self._apply(even_if_equal=False)

    def reload(self) -> ReloadOutcome:
        """Applies the file as it is, and restarts enforcement even where the policy is the same."""
        return self._apply(even_if_equal=True)

    def _apply(self, even_if_equal: bool) -> ReloadOutcome:
        try:
            policy = self._file.load()
        except Exception as error:  # noqa: BLE001  # whatever it is: what is in force stays
            return self._refuse(error, requested=even_if_equal)
        if policy == self.policy and not even_if_equal:
            self._publish(error=None)
            _log.info("the policy file was rewritten with the same content: nothing reloaded")
            return self._in_force(policy)
        try:
            self._stack.close()
            self._enforce(policy)
        except Exception as error:  # noqa: BLE001  # observing goes on
            self._publish(error=f"nothing is enforced now: {_reason(error)}")
            what = "policy not reloaded, nothing is enforced now; SIGHUP or a changed file tries again: %s"
            _log.error(what, _reason(error), exc_info=_is_defect(error))
            return ReloadOutcome(f"nothing is enforced now: {_reason(error)}", _exit_code(error))
        _log.info("policy reloaded")
        return self._in_force(policy)

    def _in_force(self, policy: Policy) -> ReloadOutcome:
        warnings = "".join(f"\nwarning: {one.text}" for one in advice(policy))
        return ReloadOutcome(f"the policy of {self._file.path} is in force: {summary(policy)}{warnings}")

    def _refuse(self, error: Exception, requested: bool) -> ReloadOutcome:
        if self.policy is None and not self._file.exists():
            self._publish(error=None)
            _log.info("no policy: observing only, not reloaded")
            return ReloadOutcome(f"there is no policy at {self._file.path}: observing only", SetupError.exit_code)
        before, reason = self._pipeline.policy.error, _reason(error)
        self._publish(error=reason)
        kept = "the old one stays in force" if self.policy is not None else "nothing is enforced"
        if requested or reason != before:  # a file that cannot be read is tried at each look
            _log.error("policy not reloaded, %s: %s", kept, reason, exc_info=_is_defect(error))
        return ReloadOutcome(f"{self._refusal(error)}\nthe policy was not reloaded: {kept}", _exit_code(error))

    def _refusal(self, error: Exception) -> str:
        checked = self._file.checked
        if checked is None or checked.value is not None or not isinstance(error, PolicyError):
            return _reason(error)
        return plain(checked, findings(checked))

    def _enforce(self, policy: Policy) -> None:
        for one in advice(policy):
            _log.warning("policy: %s", one.text)
        with ExitStack() as stack:
            stack.callback(self._clear)
            stack.enter_context(self._start(policy))
            self._stack = stack.pop_all()
        self.policy = policy
        self._pipeline.publish_policy(PolicyStatus(wall_ns=wall_ns()))

    def _clear(self) -> None:
        self.policy = None
        self._pipeline.publish_policy(replace(self._pipeline.policy, wall_ns=None))
        self._pipeline.publish(EnforcementReport())

    def _publish(self, error: str | None) -> None:
        self._pipeline.publish_policy(replace(self._pipeline.policy, error=error))


def _is_defect(error: Exception) -> bool:
    """Whether it is a defect of the agent, which is logged with its traceback."""
    return not isinstance(error, (WardenError, OSError))


def _reason(error: Exception) -> str:
    return repr(error) if _is_defect(error) else str(error)


def _exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, WardenError) else WardenError.exit_code
