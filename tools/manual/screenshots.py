# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m tools.manual.screenshots FOLDER`: pictures of gputop for the documentation, from a recording that is
there.

The recording is what `gputop --json` printed while `make demo` ran, without paths of that machine, compressed.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from textual.message_pump import MessagePump

from agent.core.text import UTF8
from agent.tui.history import SnapshotTick
from agent.tui.listing import View
from agent.tui.live.app import Setting, Top
from agent.tui.live.feed import SnapshotReceived
from agent.tui.recording import Recording, opened

PICTURES: Final = {  # how large, which keys, and what there is to see
    "gputop.svg": (
        (120, 24),
        ("t", "down", "down", "down"),
        "gputop: a device with its last minute, an online and an offline container with their processes and kernels",
    ),
    "gputop-container.svg": (
        (120, 30),
        ("down", "enter"),
        "gputop: the page of an offline container, with graphs, kernels, allocations and the last decisions",
    ),
}
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # from elsewhere: any fixed-width one does
RECORDING: Final = "gputop.jsonl.gz"


class Ended:
    """A recording of which the last tick is shown, as if it had been watched."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def start(self, top: MessagePump) -> None:
        """All of it."""
        *before, last = (self._recording[index] for index in range(len(self._recording)))
        top.post_message(SnapshotReceived(last, [SnapshotTick.of(snapshot) for snapshot in before]))

    def seek(self, step: int) -> None:
        """Not here."""

    def play(self, playing: bool) -> None:
        """Not here."""


async def picture(recording: Recording, size: tuple[int, int], keys: Sequence[str], words: str) -> str:
    """One as SVG, after these keys, which says in words what it shows."""
    top = Top(Setting(View.CONTAINER, UTF8), Ended(recording))
    async with top.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
        head, end, rest = top.export_screenshot().partition(">")
    return f"{head}{end}\n<title>{words}</title>{_FONTS.sub('', rest)}"


def main() -> None:
    """Unpacks the recording and draws each picture."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        recording = Path(name) / "gputop.jsonl"
        with gzip.open(folder / RECORDING) as packed, recording.open("wb") as file:
            shutil.copyfileobj(packed, file)
        with opened(recording) as ticks:
            for picture_name, (size, keys, words) in PICTURES.items():
                (folder / picture_name).write_text(asyncio.run(picture(ticks, size, keys, words)), encoding="utf-8")


if __name__ == "__main__":
    main()
