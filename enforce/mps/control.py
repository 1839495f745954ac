# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which language a control daemon speaks is found by trying, not by its version: 2 first, then 3.

A daemon that does not answer at all is not tried a second time: that would only double the wait.
"""

from __future__ import annotations

from enforce.mps.channel import PATIENCE_SECONDS, Channel
from enforce.mps.model import Control, Daemon, MpsError, MpsTimeoutError
from enforce.mps.protocol2 import Protocol2
from enforce.mps.protocol3 import Protocol3

LANGUAGES: tuple[type[Protocol2] | type[Protocol3], ...] = (Protocol2, Protocol3)


def connect(daemon: Daemon, patience_seconds: float = PATIENCE_SECONDS) -> Control:
    """MpsError when it speaks none of them: with what it said to the first."""
    return speak(Channel(daemon, patience_seconds))


def speak(channel: Channel) -> Control:
    """The same, over a channel to the daemon."""
    first: MpsError | None = None
    for language in LANGUAGES:
        control = language(channel)
        try:
            control.servers()
            return control
        except MpsTimeoutError:
            raise
        except MpsError as error:
            first = first or error
    assert first
    raise first
