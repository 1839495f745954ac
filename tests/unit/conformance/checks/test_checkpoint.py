# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Calls that do not come back are answers, and a GPU's memory is taken from a driver that does not give all of it."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from conformance.checks.checkpoint.refusals import asked, refused
from conformance.clients.driver import CudaError
from conformance.clients.holder import Holder
from conformance.clients.launcher import Client, SilenceError
from conformance.report.model import Verdict

MIB = 1 << 20


class Silent(Client):
    """It hangs in its call."""

    def ask(self, command: str, seconds: float) -> dict[str, Any]:
        raise SilenceError("calls did not answer in time")


def test_a_call_that_hangs_is_an_answer_and_not_the_expected_one() -> None:
    row = refused("a lock", asked(Silent.__new__(Silent), "lock 1 300", 4.0), 600)
    assert (row.verdict, row.figure, row.baseline) == (Verdict.DIFFERS, "no answer", 600)
    assert "no answer in 4 s: calls did not answer in time" in row.note


@pytest.mark.parametrize(("code", "verdict"), [(600, Verdict.OK), (801, Verdict.DIFFERS), (0, Verdict.DIFFERS)])
def test_a_refusal_is_held_against_the_error_that_should_come(code: int, verdict: Verdict) -> None:
    row = refused("a lock", {"code": code, "ms": 1.0}, 600)
    assert (row.verdict, row.figure) == (verdict, code)


class Fragmented:
    """A device of which the driver gives so much in one piece, keeps some, and takes back what it gave."""

    def __init__(self, free: int, kept: int, largest: int, error: int = 2) -> None:
        self.free_now, self._kept, self._largest, self._error = free, kept, largest, error
        self.pieces: list[int] = []
        self.multiprocessors = 1

    def free_bytes(self) -> int:
        return self.free_now

    def allocate(self, size: int) -> ctypes.c_uint64:
        if size > self._largest or size > self.free_now - self._kept:
            raise CudaError("cuMemAlloc_v2", self._error, "an error")
        self.free_now -= size
        self.pieces.append(size)
        return ctypes.c_uint64(size)

    def free(self, address: ctypes.c_uint64) -> None:
        self.free_now += address.value
        self.pieces.remove(address.value)


def holder(device: Fragmented) -> Holder:
    """One that has taken nothing so far."""
    made = Holder.__new__(Holder)
    made._gpu, made._filled = device, []  # type: ignore[assignment]
    return made


def test_what_is_free_is_taken_in_pieces_until_it_is_less_than_asked() -> None:
    device = Fragmented(free=80_000 * MIB, kept=200 * MIB, largest=30_000 * MIB)
    free = int(str(holder(device).answer(["fill", str(512 * MIB)])["free"]))
    assert free == device.free_now < 512 * MIB
    assert len(device.pieces) > 2


def test_a_device_that_gives_nothing_more_stays_as_free_as_it_is() -> None:
    device = Fragmented(free=1000 * MIB, kept=900 * MIB, largest=1000 * MIB)
    assert holder(device).answer(["fill", str(64 * MIB)])["free"] == device.free_now
    assert 900 * MIB <= device.free_now < 903 * MIB


def test_all_pieces_are_given_back() -> None:
    device = Fragmented(free=1000 * MIB, kept=0, largest=100 * MIB)
    made = holder(device)
    made.answer(["fill", str(64 * MIB)])
    assert device.pieces
    made.answer(["drop"])
    assert (device.pieces, device.free_now) == ([], 1000 * MIB)


def test_another_error_than_too_little_memory_is_not_passed_over() -> None:
    with pytest.raises(CudaError):
        holder(Fragmented(free=1000 * MIB, kept=0, largest=100 * MIB, error=700)).answer(["fill", str(64 * MIB)])
