# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the simulated GPU gave is written down once, whole, and compared with what another one gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.checks.calibration import CASES, MEAN, P99, STALLS, WHAT
from conformance.checks.enforcement.constants import CONSTANTS, read
from conformance.clients.online import Program
from conformance.report.baseline import Recorded, text_of


def report(**changed: Any) -> dict[str, Any]:
    row = {"item": "calibration", "what": 'a "launch"', "verdict": "measured", "figure": 189.0}
    other = {"item": "machine", "what": "driver", "verdict": "ok", "figure": "580"}
    return {"source": "simulated", "quick": False, "date": "2026-11-22T19:00:00", "rows": [row, other], **changed}


def test_what_is_written_down_is_read_again(tmp_path: Path) -> None:
    place = tmp_path / "simulated.toml"
    place.write_text(text_of(report(), "calibration"))
    assert Recorded.read(place) == Recorded("2026-11-22", {'a "launch"': 189.0})


def test_where_nothing_was_written_down_nothing_is_known(tmp_path: Path) -> None:
    assert Recorded.read(tmp_path / "none").figures == {}


@pytest.mark.parametrize("changed", [{"source": "real"}, {"quick": True}, {"rows": []}])
def test_only_a_whole_run_on_the_simulated_gpu_is_written_down(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"only a whole run|not all was measured"):
        text_of(report(**changed), "calibration")


def test_a_run_that_left_something_out_is_not_written_down() -> None:
    rows = [{"item": "calibration", "what": "MPS", "verdict": "skipped", "figure": None}]
    with pytest.raises(ValueError, match="not all was measured: MPS"):
        text_of(report(rows=rows), "calibration")


def test_every_figure_has_a_baseline_and_no_other_has() -> None:
    wanted = {constant.what for constant in CONSTANTS} | {stall.what for stall in STALLS}
    wanted |= {f"{case.name}: {measure}" for case in CASES for measure in (MEAN, P99)}
    assert set(WHAT) == wanted
    assert set(Recorded.read().figures) == wanted
    assert all(Recorded.read().figures[constant.what] > 0 for constant in CONSTANTS)


def test_a_queue_without_an_end_has_no_length() -> None:
    answer = {constant.key: 5 for constant in CONSTANTS} | {"queue_depth": 0}
    assert {constant.key: figure for constant, figure in read(answer)}["queue_depth"] is None


def test_the_loop_is_measured_in_the_shape_that_is_launched() -> None:
    program = Program(("--kernels", "4", "--blocks", "110", "--threads", "1024", "--host-us", "300"))
    assert program.shape == ("--blocks", "110", "--threads", "1024")
