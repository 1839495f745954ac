# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the helper program says: one line of JSON, which its caller reads back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from enforce.checkpoint.driver import State


class Kind(StrEnum):
    """How an act ended."""

    DONE = "done"
    GONE = "gone"  # the process has ended, or its pid is another's now
    NO_CUDA = "no_cuda"  # it uses no CUDA (any more)
    FOREIGN = "foreign"  # somebody else has locked it: left alone
    STOPPED = "stopped"  # it is stopped, traced or frozen, so that it cannot take part
    BUSY = "busy"  # its work did not drain in time, or another act on it is under way
    NO_ROOM = "no_room"  # its memory does not fit on the device
    UNSUPPORTED = "unsupported"  # an MPS client, or memory shared with other processes
    NO_DRIVER = "no_driver"  # no driver library, or one before R570
    TIMEOUT = "timeout"  # the driver did not return in time, or its helper died
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """One act on one process. `before` and `after`: the driver's state; None where it was not learned."""

    kind: Kind
    before: State | None = None
    after: State | None = None
    error: str | None = None

    def to_line(self) -> str:
        """As the helper prints it."""
        states = {"before": self.before, "after": self.after}
        return json.dumps(
            {"kind": self.kind}
            | {name: state.name.lower() for name, state in states.items() if state is not None}
            | ({"error": self.error} if self.error else {})
        )


def parse_answer(line: str) -> Answer:
    """The opposite of `to_line`; a helper that said something else has failed."""
    try:
        record = json.loads(line)
        kind, error = Kind(record["kind"]), record.get("error")
        before, after = (State[record[name].upper()] if name in record else None for name in ("before", "after"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer(Kind.FAILED, error=f"the checkpoint helper said {line[:80]!r}; see the agent's log")
    return Answer(kind, before, after, str(error) if error else None)
