# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy in force, and what takes its place: at SIGHUP, and when the file has changed.

Invariant: a file that is wrong or gone changes nothing that is in force, and the log, the snapshot and the metrics say
so until a right one is there. Whoever asks for a reload over the agent's socket is told what came of it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from typing import Final, Self

from agent.clock import wall_ns
from agent.errors import PolicyError, SetupError, WardenError
from agent.pipeline import Pipeline
from enforce.check import findings, plain, summary
from enforce.policy.advice import advice
from enforce.policy.file import PolicyFile
from enforce.policy.model import Policy

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 1.0  # between two looks at the file

Start = Callable[[Policy], AbstractContextManager[object]]
Reply = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of reading the policy file: lines for people, and the exit code of who asked for it."""

    text: str
    exit_code: int = 0


class Asked:
    """Those who wait for a reload, from whatever thread; whoever reloads answers them. `wake` makes it do so."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._mutex = threading.Lock()
        self._waiting: list[Reply] = []

    def order(self, _: str, reply: Reply) -> None:
        """An order of the socket's."""
        with self._mutex:
            self._waiting.append(reply)
        self._wake()

    def carry_out(self, reload: Callable[[], Outcome]) -> None:
        """Who comes while it is being done waits for the next one, since it may have changed the file meanwhile."""
        with self._mutex:
            waiting, self._waiting = self._waiting, []
        line = json.dumps(asdict(reload()))
        for reply in waiting:
            reply(line)


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

    def reload(self) -> Outcome:
        """Takes the file as it is, and begins anew even where it says what it said before."""
        return self._take(even_if_equal=True)

    def _take(self, even_if_equal: bool) -> Outcome:
        try:
            policy = self._file.load()
        except Exception as error:  # noqa: BLE001  # whatever it is: what is in force does not end with it
            return self._refuse(error, was_asked_for=even_if_equal)
        if policy == self.policy and not even_if_equal:
            self._pipeline.policy_error = None
            _log.info("the policy file was written anew and says the same: nothing reloaded")
            return self._in_force(policy)
        try:
            self._stack.close()
            self._enforce(policy)
        except Exception as error:  # noqa: BLE001  # observing goes on
            self._pipeline.policy_error = f"nothing is enforced now: {_reason(error)}"
            what = "policy not reloaded, nothing is enforced now; SIGHUP or a changed file tries again: %s"
            _log.error(what, _reason(error), exc_info=_ours(error))
            return Outcome(f"nothing is enforced now: {_reason(error)}", _exit_code(error))
        _log.info("policy reloaded")
        return self._in_force(policy)

    def _in_force(self, policy: Policy) -> Outcome:
        warnings = "".join(f"\nwarning: {one.text}" for one in advice(policy))
        return Outcome(f"the policy of {self._file.path} is in force: {summary(policy)}{warnings}")

    def _refuse(self, error: Exception, was_asked_for: bool) -> Outcome:
        if self.policy is None and not self._file.exists():
            self._pipeline.policy_error = None
            _log.info("no policy: observing only, not reloaded")
            return Outcome(f"there is no policy at {self._file.path}: observing only", SetupError.exit_code)
        before, self._pipeline.policy_error = self._pipeline.policy_error, _reason(error)
        kept = "the old one stays in force" if self.policy is not None else "nothing is enforced"
        if was_asked_for or self._pipeline.policy_error != before:  # a file that cannot be read is tried at each look
            _log.error("policy not reloaded, %s: %s", kept, _reason(error), exc_info=_ours(error))
        return Outcome(f"{self._complaint(error)}\nthe policy was not taken: {kept}", _exit_code(error))

    def _complaint(self, error: Exception) -> str:
        judged = self._file.judged
        if judged is None or not isinstance(error, PolicyError):
            return _reason(error)
        return plain(judged, findings(judged, None))

    def _enforce(self, policy: Policy) -> None:
        for one in advice(policy):
            _log.warning("policy: %s", one.text)
        with ExitStack() as stack:
            stack.callback(self._nothing_in_force)
            stack.enter_context(self._start(policy))
            self._stack = stack.pop_all()
        self.policy, self._pipeline.policy_wall_ns, self._pipeline.policy_error = policy, wall_ns(), None

    def _nothing_in_force(self) -> None:
        self.policy, self._pipeline.policy_wall_ns = None, None
        self._pipeline.enforcing, self._pipeline.enforcement, self._pipeline.device_health = False, {}, {}


def _ours(error: Exception) -> bool:
    """Whether it is a fault of ours, which is told with where it happened."""
    return not isinstance(error, (WardenError, OSError))


def _reason(error: Exception) -> str:
    return repr(error) if _ours(error) else str(error)


def _exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, WardenError) else WardenError.exit_code
