# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The hostile set has a hundred cases and more, each of one name, and its table says what was seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.hostile.__main__ import uncontained
from bench.hostile.attackers import ATTACKERS
from bench.hostile.cases import TENANTS, Threat, cases
from bench.hostile.phase import Measured
from bench.hostile.suites import SUITES, rows

ROOT = Path(__file__).parents[3]
REPORT = """
<testsuites><testsuite>
<testcase classname="tests.hostile.test_web" name="test_a"/>
<testcase classname="tests.hostile.test_web" name="test_b"><failure message="lost"/></testcase>
<testcase classname="tests.hostile.test_web" name="test_c"><error message="no node"/></testcase>
<testcase classname="tests.hostile.test_web" name="test_d"><skipped message="no root"/></testcase>
</testsuite></testsuites>
"""


def test_there_are_a_hundred_cases_and_more_of_one_name_each() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) >= 100


def test_every_attacker_is_in_a_case_but_for_the_honest_job() -> None:
    assert {case.attacker.name for case in cases()} == {attacker.name for attacker in ATTACKERS} - {"job"}


def test_a_program_is_tried_as_each_kind_of_tenant() -> None:
    tried = [case.attacker for case in cases() if case.attacker.name == "functions"]
    assert {(one.place, one.on_gpu, one.listed, one.ladder) for one in tried} == {
        (tenant.place, not tenant.own_library, tenant.listed, tenant.ladder) for tenant in TENANTS
    }


def test_what_is_to_be_seen_is_seen_by_the_beginning_of_its_name_and_of_nothing_there_is_no_verdict() -> None:
    by_name = {case.name: case for case in cases()}
    claims, scrapes = by_name["claims"], by_name["scrapes"]
    assert claims.is_seen({"claims:unlisted": 3}) is True
    assert claims.is_seen({"map:name": 3}) is False
    assert scrapes.is_seen({"map:name": 3}) is None


def test_one_that_is_held_may_be_shown_by_its_launches_and_one_that_is_not_has_to_be_by_what_it_fills() -> None:
    by_name = {case.name: case for case in cases()}
    assert by_name["functions: own library, offline, full ladder"].is_seen({"launches": 1}) is True
    assert by_name["functions: own library, unmatched, no GPU"].is_seen({"launches": 1}) is False
    assert by_name["stops: own library, unmatched"].is_seen({"launches": 1}) is None


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        (Measured(counted=9, made=9, stops_per_second=1.0), 0),
        (Measured(counted=8, made=9, stops_per_second=1.0), 1),
        (Measured(counted=9, made=9, stops_per_second=0.0, refused=2), 2),
        (Measured(), 2),
    ],
)
def test_what_reaches_others_is_not_contained(found: Measured, reached: int) -> None:
    assert len(uncontained(found)) == reached


def test_a_report_of_tests_gives_a_row_each_and_none_gives_a_failure_for_each_file() -> None:
    found = list(rows(Threat.CLIENT, REPORT, ["tests/hostile/test_web.py"]))
    assert [(row["case"], row["ok"], row["why"]) for row in found] == [
        ("test_web::test_a", True, ""),
        ("test_web::test_b", False, "lost"),
        ("test_web::test_c", False, "no node"),
        ("test_web::test_d", None, "skipped: no root"),
    ]
    assert [row["ok"] for row in rows(Threat.CLIENT, "", ["a", "b"])] == [False, False]


def test_the_files_of_the_suites_are_there() -> None:
    assert all((ROOT / file).is_file() for files in SUITES.values() for file in files)
