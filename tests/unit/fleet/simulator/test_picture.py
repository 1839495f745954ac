# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

from pathlib import Path

import pytest

from fleet.model import FleetError
from fleet.policies.fifo import Fifo
from fleet.simulator.picture import cumulative, draw
from tests.support.simulated_jobs import job, run


def test_a_distribution_rises_from_none_to_all() -> None:
    assert cumulative([30.0, 0.0, 5.0, 5.0]) == ([1.0, 1.0, 5.0, 5.0, 30.0], [0.0, 0.25, 0.5, 0.75, 1.0])


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.simulator.picture.find_spec", lambda name: None)
    with pytest.raises(FleetError, match=r"gpuwarden\[plots\]") as raised:
        draw([run(Fifo(), [job("a", 10)])], tmp_path / "picture.png")
    assert raised.value.exit_code == 3
