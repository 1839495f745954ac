# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How fast a device's loop is: measured when its clocks are up and it is idle, and shared with other clients."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from conformance.checks.mps import limits
from conformance.clients import driver, steps
from conformance.clients.launcher import Client
from conformance.machine_state import ROOT
from conformance.report.model import Verdict

MS = 1_000_000
PACE = ("--iterations-per-us", "21")


def timed_until_steady(times_ms: Iterator[int]) -> list[int]:
    timed: list[int] = []

    def once() -> int:
        timed.append(next(times_ms))
        return timed[-1] * MS

    driver.until_steady(once)
    return timed


def test_clocks_that_do_not_rise_take_two_looks() -> None:
    assert timed_until_steady(itertools.repeat(15)) == [15, 15]


def test_clocks_that_rise_are_waited_for() -> None:
    assert timed_until_steady(iter([60, 45, 30, 20, 15, 15, 15])) == [60, 45, 30, 20, 15, 15]


def test_clocks_that_never_settle_are_given_up() -> None:
    assert 500 <= sum(timed_until_steady(itertools.cycle([20, 10]))) <= 520


def test_the_pace_leaves_out_what_a_launch_costs_and_rounds_that_something_disturbed() -> None:
    short_ns, long_ns = 5 * MS + 20_000, 15 * MS + 20_000  # at 20 steps in a microsecond, where 100 were guessed
    assert driver.pace_of([(short_ns, long_ns)]) == 20
    assert driver.pace_of([(short_ns, 40 * MS), (9 * MS, long_ns)]) == 20


def test_a_pace_that_is_given_is_not_measured() -> None:
    gpu = MagicMock(multiprocessors=2)
    gpu.allocate.return_value = ctypes.c_uint64(4096)
    work = driver.Sequences(gpu, 3 * MS, blocks=4, threads=32, pace=7)
    assert work.steps == 3000 * 7
    gpu.launch.assert_not_called()


def test_what_is_written_is_there_before_a_stream_that_does_not_wait_can_read_it() -> None:
    gpu = object.__new__(driver.Gpu)
    gpu.cuda = MagicMock()
    gpu.write(4096, b"numbers")
    assert [call.args[0] for call in gpu.cuda.call.call_args_list] == ["cuMemcpyHtoD_v2", "cuCtxSynchronize"]


def test_one_client_measures_and_others_take_its_pace() -> None:
    assert Client(MagicMock(), MagicMock(), {"ready": True, "iterations_per_us": 21}).pace == PACE
    assert steps.parser().parse_args(["--library", "libcuda.so.1", *PACE]).iterations_per_us == 21


def test_clients_under_a_limit_launch_the_kernels_of_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that chose and measured for itself would make up for the limit: fewer blocks, of fewer steps."""
    started: list[tuple[str, ...]] = []
    clients = iter([(132, 1056, 1000), (66, 1056, 500), (33, 1056, 250)])  # SMs, blocks, kernels in a second

    class Stage(SimpleNamespace):
        seconds = 1.0

        @contextmanager
        def steps(self, *options: str) -> Iterator[Client]:
            started.append(options)
            sms, blocks, rate = next(clients)
            ready = {"blocks": blocks, "multiprocessors": sms, "iterations_per_us": 21}
            client = MagicMock(ready=ready, pace=PACE)
            client.finish.return_value = {"ended_ns": [at * 1000 * MS // rate + 1 for at in range(rate)]}
            yield client

    @contextmanager
    def staged(_: object) -> Iterator[Stage]:
        yield Stage()

    monkeypatch.setattr(limits, "staged", staged)
    monkeypatch.setattr(limits, "_scope", lambda _: (None, None))
    monkeypatch.setattr(limits, "_put", lambda *_: None)
    monkeypatch.setattr(limits, "window", lambda _: (0, 1000 * MS))
    monkeypatch.setattr(limits, "_WARM_SECONDS", 0.0)
    rows = list(limits.shares(MagicMock()))
    assert [row.figure for row in rows] == [0.5, 0.25, 1.0]
    assert {row.verdict for row in rows} == {Verdict.OK}
    assert len(started) == 3
    assert all(options[-4:] == ("--blocks", "1056", *PACE) for options in started[1:])


def test_all_our_ptx_is_for_one_target() -> None:
    head = "".join(f"{line}\n" for line in driver.PTX.decode().split("\n")[:3])
    header = (ROOT / "sim" / "include" / "ptx.h").read_text()
    assert f'#define PTX_HEAD "{head}"'.replace("\n", "\\n") in header
    sources = [path for folder in ("bench", "gpu", "sim", "tests") for path in (ROOT / folder).rglob("*.[ch]")]
    named = {path.name for path in sources if ".target " in path.read_text()}
    assert named == {"ptx.h", "image.c", "libcuda_test.c"}  # image.c reads it, libcuda_test.c tries wrong ones
