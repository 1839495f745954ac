# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Starting to enforce, where it fails halfway: what was started is ended."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from enforce import service
from enforce.service import EnforcementService, EnforcementSettings


def test_a_guardian_that_cannot_be_watched_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Mock()
    supervisor.start.side_effect = RuntimeError("can't start new thread")  # after the guardian was started
    monkeypatch.setattr(service, "Supervisor", Mock(return_value=supervisor))
    anything: Any = MagicMock()
    settings = EnforcementSettings(tmp_path, "", anything, anything)
    with pytest.raises(RuntimeError), ExitStack() as stack:
        EnforcementService(anything, anything, settings)._actuation(anything, anything, anything, stack)
    supervisor.stop.assert_called_once_with()
