# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How long our kernels are, from what our workloads say of themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conformance.clients.workload import (
    Pace,
    Workload,
    WorkloadError,
    busy_ratio,
    pause_us,
    seconds_per_kernel,
    steps,
    tuned,
)

SECOND = 10**9


@contextmanager
def workload(script: str, folder: Path) -> Iterator[Workload]:
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        found = Workload(process, folder / "name.json")
        found.read()
        process.wait()
        yield found


def test_a_loop_that_is_too_slow_gets_fewer_iterations_and_the_rest_is_known() -> None:
    pace = tuned(seconds_per_kernel=0.0015, iterations_per_us=20, asked_ns=1_000_000)
    assert pace.iterations_per_us == 13
    assert pace.ratio == pytest.approx(1.5 * 13 / 20)
    assert pace.seconds(1000, 500) == pytest.approx(0.5 * pace.ratio)


def test_even_the_slowest_loop_has_one_iteration() -> None:
    assert tuned(0.2, iterations_per_us=20) == Pace(1, 10.0)


def test_the_first_second_is_left_out_where_there_is_more() -> None:
    progress = [(1 * SECOND, 700), (2 * SECOND, 1700), (3 * SECOND, 2700)]
    assert seconds_per_kernel(progress, {"kernels": 2800, "elapsed_seconds": 3.5}) == pytest.approx(0.001)
    assert seconds_per_kernel(progress[:1], {"kernels": 2800, "elapsed_seconds": 3.5}) == pytest.approx(0.00125)


def test_a_workload_without_a_kernel_has_no_pace() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        seconds_per_kernel([], {"kernels": 0, "elapsed_seconds": 1.0})


def test_the_pause_makes_the_kernels_their_part_of_the_time() -> None:
    pace = Pace(20, 1.1)
    pause = pause_us(pace, 5, 1000, duty_cycle=0.25)
    assert 5500 / (5500 + pause) == pytest.approx(0.25)
    assert pause_us(pace, 5, 1000, duty_cycle=1.0) == 0


def test_kernels_in_steps_are_as_long_as_the_pace_gives() -> None:
    words = steps(Pace(17, 1.02), kernels=5, kernel_us=1000, blocks=66, host_us=15000.4)
    assert words[words.index("--iterations-per-us") + 1] == "17"
    assert words[words.index("--blocks") + 1] == "66"
    assert words[words.index("--host-us") + 1] == "15000.4"


def test_busy_is_kernels_times_their_length() -> None:
    assert busy_ratio({"kernels": 400, "elapsed_seconds": 2.0}, Pace(20, 1.25), 1000) == pytest.approx(0.25)


def test_progress_is_read_with_the_time_of_each_line(tmp_path: Path) -> None:
    line = "1.0 s: 3 steps, 21 kernels, 21 since the last line"
    with workload(f"echo ready; echo '{line}'; echo else", tmp_path) as found:
        found.wait_ready()
        assert [kernels for _, kernels in found.kernels] == [21]
        assert found.kernels[0][0] > 0


def test_a_workload_that_fails_prints_the_reason(tmp_path: Path) -> None:
    with (
        workload("echo cuInit failed >&2; exit 1", tmp_path) as found,
        pytest.raises(WorkloadError, match="cuInit failed"),
    ):
        found.wait_ready()


def test_a_workload_without_a_summary_is_an_error(tmp_path: Path) -> None:
    with workload("echo ready", tmp_path) as found, pytest.raises(WorkloadError, match="no summary"):
        found.finish()
