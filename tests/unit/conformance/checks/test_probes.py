# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is made of launch rates with and without probes; the functions whose hits are timed."""

from __future__ import annotations

from pathlib import Path

from conformance.checks.probes.item import WHAT, launch_rows
from conformance.checks.probes.machine_code import FUNCTIONS, LOOP, write
from conformance.report.model import Row, Verdict

RATES = {
    "bare": [500_000.0, 400_000.0, 1_000_000.0],
    "empty": [400_000.0, 320_000.0, 500_000.0],
    "watched": [380_000.0, 250_000.0, 490_000.0],
}


def rows(claimed: bool = True) -> dict[str, Row]:
    found = {row.what: row for row in launch_rows(RATES, claimed=claimed)}
    assert set(found) <= set(WHAT)
    return found


def test_rates_are_compared_within_their_round() -> None:
    assert rows()["launch rate, empty programs per no probes"].figure == 0.8
    assert rows()["launch rate, the agent per no probes"].figure == 0.625
    assert rows()["launch rate, the agent per empty programs"].figure == 0.95
    assert rows()["launches per second, no probes"].figure == 500_000


def test_what_a_launch_takes_longer_is_in_nanoseconds() -> None:
    row = rows()["a launch takes longer by, empty programs"]
    assert (row.figure, row.unit) == (625, "ns")  # of 500, 625 and 1,000


def test_only_on_a_real_gpu_the_claim_of_the_bench_is_judged() -> None:
    what = "launch rate, the agent per empty programs"
    assert rows()[what].verdict is Verdict.OK
    assert rows(claimed=False)[what].verdict is Verdict.MEASURED
    slower = {**RATES, "watched": [370_000.0, 250_000.0, 400_000.0]}
    (row,) = [row for row in launch_rows(slower, claimed=True) if row.what == what]
    assert row.verdict is Verdict.DIFFERS


def test_launches_that_the_gpu_holds_back_tell_nothing_of_a_probe() -> None:
    what = "launch rate, the agent per empty programs"
    found = {ns: {r.what: r for r in launch_rows(RATES, claimed=True, kernel_ns=ns)} for ns in (1_900.0, 1_600.0)}
    held_back = found[1_900.0][what]  # the median of launches without probes is 2,000 ns
    assert (held_back.verdict, held_back.baseline) == (Verdict.MEASURED, 1.0)
    assert "1900 ns" in held_back.note
    assert "1900 ns" in found[1_900.0]["a launch takes longer by, the agent"].note
    assert found[1_600.0][what].verdict is Verdict.OK
    assert found[1_600.0][what].note == ""


def test_functions_lie_where_the_report_puts_them(tmp_path: Path) -> None:
    places = write(tmp_path / "code")
    text = (tmp_path / "code").read_bytes()
    for name, code in {"loop": LOOP, **FUNCTIONS}.items():
        assert text[places[name] :].startswith(code)
        assert code.endswith(b"\xc3")
    assert len(set(places.values())) == len(places)
