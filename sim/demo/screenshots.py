# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m sim.demo.screenshots FOLDER`: pictures of gputop for the documentation, from a recording of the demo there.

The recording is what `gputop --json` printed while `make demo` ran, without machine's paths, compressed.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from agent.tui.app import FAR, Setting, Top
from agent.tui.cells import UTF8
from agent.tui.entries import View
from agent.tui.feed import Playing
from agent.tui.recording import opened

SIZE: Final = (120, 30)
RECORDING: Final = "gputop.jsonl.gz"


async def pictures(recording: Path, folder: Path) -> None:
    """The list with its tree, and the page of the container that is held."""
    with opened(recording) as ticks:
        top = Top(Setting(View.CONTAINER, UTF8, replaying=True), Playing(ticks, lambda snapshot: snapshot, 3600.0))
        async with top.run_test(size=SIZE) as pilot:
            top.feed.seek(FAR)
            await pilot.pause()
            await pilot.press("t", "down", "down", "down")
            await pilot.pause()
            top.save_screenshot("gputop.svg", str(folder))
            await pilot.press("enter")
            await pilot.pause()
            top.save_screenshot("gputop-container.svg", str(folder))


def main() -> None:
    """Unpacks the recording and draws."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        recording = Path(name) / "gputop.jsonl"
        with gzip.open(folder / RECORDING) as packed, recording.open("wb") as file:
            shutil.copyfileobj(packed, file)
        asyncio.run(pictures(recording, folder))


if __name__ == "__main__":
    main()
