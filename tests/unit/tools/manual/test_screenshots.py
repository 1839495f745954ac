# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pictures of the status page for the documentation: the policy they are taken under, and no picture for a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.core.errors import SetupError
from enforce.policy.load import load
from sim.demo.shapes import write_policy
from tools.manual.page_screenshots import TARGET_SECONDS, picture


def test_an_old_picture_is_not_taken_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, old = tmp_path / "chromium", tmp_path / "status-light.png"
    browser.write_text("#!/bin/sh\necho no font found >&2\n")
    browser.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    old.write_bytes(b"an old picture")
    with pytest.raises(SetupError, match="took no picture: no font found"):
        picture("http://127.0.0.1:1", 1, old, tmp_path / "profile")


def test_the_policy_of_the_pictures_is_one_that_the_agent_takes(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy.yaml", TARGET_SECONDS, enforce=True)
    policy = load(tmp_path / "policy.yaml", strict_permissions=True)
    assert policy.enforce
    assert policy.online[0].slo.target_ns == 6_000_000
