# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is made of the driver library's exports and of the addresses that it gives out."""

from __future__ import annotations

from pathlib import Path

from conformance.checks import lists
from conformance.checks.exports import WHAT, ProcAddress, bases, linked_row, pointer_rows, symbol_rows
from conformance.programs.addresses import Places
from conformance.report.model import Row, Verdict

EXPORTS = {
    "cuLaunchKernel": 0x100,
    "cuLaunchKernel_ptsz": 0x200,
    "cuMemAlloc": 0x300,
    "cuMemAlloc_v2": 0x400,
    "cuMemAlloc_v9": 0x500,
    "cuInit": 0x600,
}
PROBED = ["cuLaunchKernel", "cuLaunchKernel_ptsz", "cuMemAlloc", "cuMemAlloc_v2", "cuGraphLaunch"]
GIVEN = [
    ProcAddress("cuLaunchKernel", "default", 4000, 0x100),
    ProcAddress("cuLaunchKernel", "legacy", 4000, 0x100),
    ProcAddress("cuLaunchKernel", "per-thread", 4000, 0x200),
    ProcAddress("cuMemAlloc", "default", 2000, 0x300),
    ProcAddress("cuMemAlloc", "default", 3020, 0x400),
]


def by_what(rows: list[Row]) -> dict[str, Row]:
    found = {row.what: row for row in rows}
    assert all(any(lists(pattern, what) for pattern in WHAT) for what in found)
    assert len(found) == len(rows)
    return found


def pointers(*more: ProcAddress) -> dict[str, Row]:
    return by_what(list(pointer_rows(EXPORTS, PROBED, [*GIVEN, *more], 13000)))


def test_programs_ask_for_names_without_version_and_kind_of_stream() -> None:
    names = ["cuMemcpy2D_v2_ptds", "cuMemcpy2D", "cuLaunchKernel_ptsz", "cuMemAlloc_v2"]
    assert bases(names) == ["cuLaunchKernel", "cuMemAlloc", "cuMemcpy2D"]


def test_absent_symbols_and_newer_versions_are_named() -> None:
    rows = by_what(list(symbol_rows(EXPORTS, PROBED)))
    exported = rows["probed symbols that libcuda exports"]
    assert (exported.figure, exported.baseline) == (4, 5)
    assert exported.note.endswith("cuGraphLaunch")
    newer = rows["newer versions of probed calls that no probe knows"]
    assert (newer.verdict, newer.figure, newer.note) == (Verdict.DIFFERS, 1, "cuMemAlloc_v9")


def test_addresses_that_are_probed_exports_are_all_that_was_expected() -> None:
    rows = pointers()
    assert {row.verdict for row in rows.values()} == {Verdict.OK, Verdict.MEASURED}
    whole = rows["cuGetProcAddress gives functions that are probed"]
    assert (whole.figure, whole.baseline) == (5, 5)
    assert rows["probed exports that cuGetProcAddress gives for no version"].figure == 0


def test_an_inner_address_is_a_row_of_its_own() -> None:
    rows = pointers(
        ProcAddress("cuLaunchKernel", "default", 12000, 0x108),
        ProcAddress("cuLaunchKernel", "legacy", 12000, "/lib/other.so"),
    )
    row = rows["cuLaunchKernel: cuGetProcAddress gives no export"]
    assert row.verdict is Verdict.DIFFERS
    assert row.figure == "/lib/other.so, 0x108"
    assert "default 12000" in row.note
    for what in ("cuGetProcAddress gives exported functions", "cuGetProcAddress gives functions that are probed"):
        assert (rows[what].verdict, rows[what].figure, rows[what].baseline) == (Verdict.DIFFERS, 5, 7)


def test_an_export_without_a_probe_is_a_row_of_its_own() -> None:
    rows = pointers(ProcAddress("cuMemAlloc", "default", 13000, 0x500))
    row = rows["cuMemAlloc: cuGetProcAddress gives an unprobed export"]
    assert (row.verdict, row.figure) == (Verdict.DIFFERS, "cuMemAlloc_v9")
    assert rows["cuGetProcAddress gives exported functions"].verdict is Verdict.OK
    assert rows["cuGetProcAddress gives functions that are probed"].verdict is Verdict.DIFFERS


def test_a_per_thread_stream_that_gets_the_legacy_function_is_seen() -> None:
    what = "per-thread default streams: cuGetProcAddress gives the functions with _ptsz or _ptds"
    assert pointers()[what].verdict is Verdict.OK
    row = pointers(ProcAddress("cuLaunchKernel", "per-thread", 13000, 0x100))[what]
    assert (row.verdict, row.note) == (Verdict.DIFFERS, "others: cuLaunchKernel")


def test_no_answer_at_all_is_no_agreement() -> None:
    rows = by_what(list(pointer_rows(EXPORTS, PROBED, [], 13000)))
    assert rows["cuGetProcAddress gives exported functions"].verdict is Verdict.FAILED


def test_a_name_that_is_linked_elsewhere_is_named() -> None:
    assert linked_row(EXPORTS, EXPORTS).verdict is Verdict.OK
    row = linked_row(EXPORTS, {**EXPORTS, "cuInit": 0x700, "cuLaunchKernel": "/lib/other.so"})
    assert row.verdict is Verdict.DIFFERS
    assert row.note == "elsewhere: cuLaunchKernel, cuInit"


def test_an_address_is_reported_as_its_place_in_the_library_whatever_the_inode_beside_it(tmp_path: Path) -> None:
    library, other = tmp_path / "libcuda.so.1", tmp_path / "libother.so"
    for path in (library, other):
        path.touch()
    places = Places(
        str(library),
        f"7f0000001000-7f0000003000 r-xp 00002000 00:00 0                          {library}\n"
        f"7f0000004000-7f0000005000 r-xp 00001000 08:01 {library.stat().st_ino}  {other}\n"
        "7f0000006000-7f0000007000 rw-p 00000000 00:00 0 \n",
    )
    assert places.of(0x7F0000001010) == 0x2010
    assert places.of(0x7F0000004010) == str(other)
    assert places.of(0x7F0000006010) == "memory of no file"
    assert places.of(0x10) == "nowhere"
