# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pictures of the status page for the documentation, when the browser takes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import SetupError
from sim.demo.status_page import picture


def test_an_old_picture_is_not_taken_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, old = tmp_path / "chromium", tmp_path / "status-light.png"
    browser.write_text("#!/bin/sh\necho no font found >&2\n")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    old.write_bytes(b"an old picture")
    with pytest.raises(SetupError, match="took no picture: no font found"):
        picture("http://127.0.0.1:1", 1, old, tmp_path / "profile")
