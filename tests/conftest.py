# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What holds for every test: its tier, a second try, a skip that is known, and the number of hypothesis' examples.

- A test's tier is the folder that it lies in, so that none can be without.
- In CI, a test that is no unit test and fails runs once more, and is listed as RERUN with what failed: those depend on
  a machine that may stall. One that fails twice fails the run, and so do more than MOST_SECOND_TRIES of them.
- With CI in the environment, a run in which a test is skipped that is not in KNOWN_SKIPS fails: what a machine lacks
  must not look like what was tested.
- CI tries the same examples each time; people try new ones; `--long` tries many new ones, wherever it runs.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

MOST_SECOND_TRIES: Final = 5
"""More in one run are no accident"""

_NO_WHEEL = "no wheel was built: make release-check"
KNOWN_SKIPS: Final[Mapping[str, str]] = {
    f"tests/e2e/packaging/test_the_wheel.py::{name}": _NO_WHEEL
    for name in (
        "test_the_wheel_has_the_programs_that_were_compiled_here",
        "test_the_programs_say_their_version_and_options",
        "test_doctor_attaches_the_wheels_own_programs",
        "test_the_agent_counts_what_a_container_launches",
        "test_the_demo_reports_that_the_wheel_has_no_simulated_gpu",
    )
}
"""Test → what CI lacks for it"""

TIERS: Final = ("unit", "contract", "kernel", "driver", "sim", "e2e", "hostile", "gpu")
_EXAMPLES: Final = 100
_LONG_FACTOR: Final = 10
_ROOT: Final = Path(__file__).parent

unknown_skips = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long`, for a run on a schedule."""
    words = f"try {_LONG_FACTOR} times as many examples of each property, other ones each time"
    parser.addoption("--long", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Loads hypothesis' profile, before any test module is imported: decorators take their defaults from it."""
    long = config.getoption("--long")
    settings.register_profile(
        "here",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ and not long,
        max_examples=_EXAMPLES * (_LONG_FACTOR if long else 1),
        print_blob=True,  # @reproduce_failure, to be pasted above the test
    )
    settings.load_profile("here")
    config.stash[unknown_skips] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks every test with its tier, and skips the tiers that only root can run."""
    for item in items:
        tier = item.path.relative_to(_ROOT).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path} is in no tier; move it into one of tests/{{{','.join(TIERS)}}}/")
        item.add_marker(tier)
        if tier != "unit" and "CI" in os.environ:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if tier in ("kernel", "driver", "e2e", "hostile") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason=f"the {tier} tier needs root"))
        if config.getoption("--long"):
            _try_more(item)


def _try_more(item: pytest.Item) -> None:
    """Multiplies a number of examples that the test sets itself: the profile does not apply to it."""
    name = "_hypothesis_internal_use_settings"
    test: Any = getattr(item, "obj", None)
    own = getattr(test, name, None)
    if own is not None and own.max_examples != _EXAMPLES * _LONG_FACTOR:
        setattr(test, name, settings(own, max_examples=own.max_examples * _LONG_FACTOR))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes the skips that are not in KNOWN_SKIPS, with their reasons."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if KNOWN_SKIPS.get(item.nodeid) not in (reason, reason.removeprefix("Skipped: ")):
            item.config.stash[unknown_skips][item.nodeid] = reason
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turns success into failure where CI skipped what it should run, or needed too many second tries."""
    tries = second_tries(session.config.pluginmanager.get_plugin("terminalreporter"))
    is_doubtful = session.config.stash[unknown_skips] or len(tries) > MOST_SECOND_TRIES
    if "CI" in os.environ and is_doubtful and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Lists the second tries, with what failed at the first, and the skips that CI does not know."""
    if tries := second_tries(terminalreporter):
        terminalreporter.section(f"a second try: {len(tries)}, of {MOST_SECOND_TRIES} at most")
        for report in tries:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})")
            terminalreporter.write_line(report.longreprtext)
    if "CI" in os.environ and (skips := config.stash[unknown_skips]):
        terminalreporter.section("skipped, and not in KNOWN_SKIPS of tests/conftest.py")
        for nodeid, reason in skips.items():
            terminalreporter.write_line(f"{nodeid}: {reason}")


def second_tries(terminalreporter: Any) -> list[pytest.TestReport]:
    """The failures after which a test ran once more."""
    return list(terminalreporter.stats.get("rerun", ()))
