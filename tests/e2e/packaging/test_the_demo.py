# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden demo`, ended by Ctrl-C: nothing of it is left behind. A whole one is looked at in test_newcomer.py.

It is started where packages lie that are called as ours: those are never run.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.packaging.demo import DEADLINE_SECONDS, demo, left_behind
from tools.harness.wait import until


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("phase", ["online alone (", "online alone, watched"])
def test_ctrl_c_leaves_nothing_behind(phase: str, folder: Path) -> None:
    with demo(folder) as process:
        out = folder / "out"
        until(lambda: phase in out.read_text() or process.poll() is not None, phase, seconds=DEADLINE_SECONDS)
        until(lambda: any(folder.glob("tmp/*/containers/containers/chat/pid")), "the container to run")
        now = left_behind(folder, process.pid)  # so that it would be noticed
        assert any("cgroup" in one for one in now)
        assert any("process" in one for one in now)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=DEADLINE_SECONDS) == 130
    assert "Traceback" not in (folder / "err").read_text()
    assert left_behind(folder, process.pid) == []
