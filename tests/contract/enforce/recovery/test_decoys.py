# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Root starts the agent in a folder that others write, with that on Python's path: none of its programs runs what lies
there under our names."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.node.procfs import Procfs
from enforce.actuators.checkpoint.driver import AnswerKind
from enforce.actuators.checkpoint.helper import ask
from enforce.policy.load import parse
from enforce.recovery.supervisor import Supervisor


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once something of the working directory, or of PYTHONPATH, was run."""
    ran = tmp_path / "ran"
    for name in ("agent", "enforce", "gpuwarden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return ran


def test_the_guardian_is_ours(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shared = SimpleNamespace(share=lambda _entries: [SimpleNamespace()])
    bpf = SimpleNamespace(map_fd=lambda _name: 0)  # which is no map: the guardian ends at once, and reports where
    probes: Any = SimpleNamespace(bpf=bpf, map=lambda _name: shared)
    it = Supervisor(probes, ran.with_name("ledger"), parse("version: 1\n", "defaults").tuning)
    it._spawn()
    assert it._process is not None
    with it._process as guardian:
        assert guardian.wait(timeout=60) != 0
    assert not ran.exists()
    assert "enforce/recovery/guardian.py" in capfd.readouterr().err


def test_the_checkpoint_helper_is_ours(ran: Path) -> None:
    answer = ask("state", Procfs().process_id(os.getpid()), library=__file__)
    assert not ran.exists()
    assert answer.kind is AnswerKind.NO_DRIVER
