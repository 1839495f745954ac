# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What holds for every test: its tier, a second try, a skip that is known, and the number of hypothesis' examples.

- A test's tier is the folder that it lies in, so that none can be without.
- With two workers (`pytest --numprocesses=2`) tests at the edge run beside those of probes, then those of the product
  from outside beside hostile programs, each with a copy of the simulated GPU's programs and libraries, then what is
  ASIDE, which has the CPU time that is left over.
- In CI a test of SECOND_TRIES that fails runs once more, and is listed as RERUN with what failed. No other one does.
- With CI in the environment, a run in which a test is skipped that is not in KNOWN_SKIPS fails: what a machine lacks
  must not look like what was tested.
- CI tries the same examples each time; people try new ones; `--long` tries many new ones, wherever it runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

SECOND_TRIES: Final[Mapping[str, str]] = {
    "tests/e2e/enforcing/test_two_quantiles.py": "a service is to be late by its load, not by a machine that stalls",
    "tests/e2e/enforcing/test_fixed_share.py": "shares of time that are measured over some seconds",
    "tests/e2e/enforcing/test_deadlines.py": "requests that have to end within 60 ms",
    "tests/e2e/observing/test_bench_attribution.py": "estimates by what NVML polled in a few seconds",
}
"""Files of tests that judge what a stall of the machine changes, and why; at most five, none is the aim"""

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

PIECES: Final = {
    "things at the edge": ("tests/contract/", "tests/sim/"),
    "probes": ("tests/kernel/", "tests/driver/"),
    "agents": ("tests/e2e/",),
    "hostile programs": ("tests/hostile/",),
}
"""What runs one test after another, of those that need the machine"""

STOCK_KERNELS: Final = (
    "tests/driver/test_denial.py",
    "tests/kernel/launches/test_confined_on_stock_kernels.py",
    "tests/kernel/memory/test_quota_on_stock_kernels.py",
    "tests/kernel/probes/test_objects_on_stock_kernels.py",
    "tests/kernel/probes/test_seccomp_on_stock_kernels.py",
)
"""Tests that take all CPUs: part of the last piece, as nothing that they run beside judges a time"""

WHOLE_RUNS: Final = (
    "tests/e2e/frameworks/",
    "tests/e2e/packaging/test_gpu_bundle.py",
    "tests/e2e/packaging/test_newcomer.py",
)
"""Minutes of whole runs, which judge no time either: there too, so that both workers have as much to do"""

ASIDE: Final = (
    "tests/unit/",
    "tests/contract/dashboards/",
    "tests/contract/packaging/",
)
"""Tests that disturb no other and may take as long as it takes: no GPU program, container or probe"""

TIERS: Final = ("unit", "contract", "kernel", "driver", "sim", "e2e", "hostile", "gpu")
_EXAMPLES: Final = 100
_LONG_FACTOR: Final = 10
_ROOT: Final = Path(__file__).parent

_UNKNOWN_SKIP: Final = "skipped, and not known"


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
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # a child that a test forks would get threads of a server that lives
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # rich would colour what is no terminal
        os.environ.pop(name, None)
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in ("LINES", "COLUMNS"):  # execnet gives it the size of a terminal, which programs would draw for
            os.environ.pop(name, None)
        _use_own_simulator(os.environ["PYTEST_XDIST_WORKER"])


def _use_own_simulator(worker: str) -> None:
    """A copy of what `make sim` built: an agent that is to see one libcuda alone does not see the other worker's."""
    built, own = _ROOT.parent / "sim" / "build", _ROOT.parent / "build" / "tests" / worker
    shutil.rmtree(own, ignore_errors=True)
    if built.exists():
        shutil.copytree(built, own, symlinks=True)
        os.environ["GPUWARDEN_SIM_BUILD"] = str(own)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks every test with its tier, and skips the tiers that only root can run."""
    for item in items:
        tier = item.path.relative_to(_ROOT).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.path} is in no tier; move it into one of tests/{{{','.join(TIERS)}}}/")
        item.add_marker(tier)
        if "CI" in os.environ and item.nodeid.partition("::")[0] in SECOND_TRIES:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if tier in ("kernel", "driver", "e2e", "hostile") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason=f"the {tier} tier needs root"))
        if config.getoption("--long"):
            _try_more(item)
    ranks = {name: rank for rank, name in enumerate(PIECES)}
    items.sort(key=lambda item: ranks.get(_piece(item.nodeid), len(ranks)))


def _try_more(item: pytest.Item) -> None:
    """Multiplies a number of examples that the test sets itself: the profile does not apply to it."""
    name = "_hypothesis_internal_use_settings"
    test: Any = getattr(item, "obj", None)
    own = getattr(test, name, None)
    if own is not None and own.max_examples != _EXAMPLES * _LONG_FACTOR:
        setattr(test, name, settings(own, max_examples=own.max_examples * _LONG_FACTOR))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes the skips that are not in KNOWN_SKIPS, with their reasons, in their reports: those reach every process."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if KNOWN_SKIPS.get(item.nodeid) not in (reason, reason.removeprefix("Skipped: ")):
            report.user_properties.append((_UNKNOWN_SKIP, reason))
    return report


def _piece(nodeid: str) -> str:
    """Which tests it runs with, one after another, on one worker."""
    if nodeid.startswith(ASIDE):
        return nodeid.partition("::")[0]
    if nodeid.startswith((*STOCK_KERNELS, *WHOLE_RUNS)):
        return "hostile programs"
    return next((name for name, tiers in PIECES.items() if nodeid.startswith(tiers)), nodeid)


class _Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """A worker that has ended one piece takes the next one."""

    def _split_scope(self, nodeid: str) -> str:
        return _piece(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Whatever --dist says: the pieces in the order of the tests."""
    config.option.loadscopereorder = False
    return _Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What runs beside tests that need the machine gives way to them, with all that it starts."""
    if "PYTEST_XDIST_WORKER" not in os.environ or os.geteuid() != 0:
        return (yield)
    policy = os.SCHED_IDLE if item.nodeid.startswith(ASIDE) else os.SCHED_OTHER
    if os.sched_getscheduler(0) != policy:
        os.sched_setscheduler(0, policy, os.sched_param(0))
    return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists the second tries, with what failed at the first, and the skips that CI does not know."""
    if tries := second_tries(terminalreporter):
        terminalreporter.section(f"a second try: {len(tries)}")
        for report in tries:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})")
            terminalreporter.write_line(report.longreprtext)
    if "CI" in os.environ and (skips := unknown_skips(terminalreporter)):
        terminalreporter.section("skipped, and not in KNOWN_SKIPS of tests/conftest.py")
        for nodeid, reason in skips.items():
            terminalreporter.write_line(f"{nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turns success into failure where CI skipped what it should run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "CI" not in os.environ or reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return  # a worker has no reporter: the process that started it judges
    if unknown_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def unknown_skips(terminalreporter: Any) -> dict[str, str]:
    """The skips that are not in KNOWN_SKIPS, with their reasons."""
    skipped = terminalreporter.stats.get("skipped", ())
    return {one.nodeid: why for one in skipped for name, why in one.user_properties if name == _UNKNOWN_SKIP}


def second_tries(terminalreporter: Any) -> list[pytest.TestReport]:
    """The failures after which a test ran once more."""
    return list(terminalreporter.stats.get("rerun", ()))
