# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy in force while its file is edited, replaced, swapped, broken and deleted."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from agent.config.validation import Checked, WatchedFile, unchanged_since_last_look
from agent.core.errors import PolicyError, SetupError
from agent.node.procfs import Procfs
from agent.pipeline import EnforcementReport, Pipeline
from enforce.audit.history import DecisionHistory
from enforce.device_health import SysMonitor
from enforce.policy.load import check_file, load, parse
from enforce.policy.model import Policy
from enforce.reload import PolicyReloader, ReloadOutcome, ReloadRequests, policy_file
from enforce.service import EnforcementService, EnforcementSettings

RIGHT = """\
version: 1
online:
  - name: chat
    match: {container: chat}
    slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
offline:
  - name: training
    match: {container: training}
"""
OTHER = RIGHT.replace("50ms", "60ms")
SUMMARY = "1 online rule, 1 offline rule, deciding and logging only (enforce: false)"
WRONG = RIGHT.replace("container: training", "contaner: training").replace("50ms", "50 parsecs")


@dataclass(slots=True)
class Enforced:
    """What was in force, in turn; the last one still is if `running`."""

    targets_ms: list[int] = field(default_factory=list)
    running: int = 0
    refusal: Exception | None = None
    fault_at_end: Exception | None = None

    @contextmanager
    def start(self, policy: Policy) -> Iterator[None]:
        if self.refusal is not None:
            raise self.refusal
        self.targets_ms.append(policy.online[0].slo.target_ns // 1_000_000)
        self.running += 1
        yield
        self.running -= 1
        if self.fault_at_end is not None:
            raise self.fault_at_end


@dataclass(slots=True)
class Place:
    """A policy file, and an agent that keeps to it."""

    path: Path
    enforced: Enforced = field(default_factory=Enforced)
    pipeline: Pipeline = field(default_factory=lambda: Pipeline([], cast(Any, None), None))
    check: Callable[[Path], Checked[Policy]] = lambda path: check_file(path, strict_permissions=True)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    @contextmanager
    def agent(self) -> Iterator[PolicyReloader]:
        file = WatchedFile(self.path, lambda path: self.check(path), unchanged_since_last_look)
        policy = file.load() if file.exists() else None
        with PolicyReloader(file, policy, self.pipeline, self.enforced.start) as reloading:
            yield reloading
        assert self.enforced.running == 0


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "policy.yaml")
    made.write(RIGHT)
    return made


def edit(path: Path, text: str) -> None:
    path.write_text(text)


def rename_over(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)


def swap_data(path: Path, text: str) -> None:
    """As the kubelet does with a ConfigMap: policy.yaml → ..data/policy.yaml, ..data → ..1 and then ..2."""
    folder = path.with_name(f"..{len(list(path.parent.iterdir()))}")
    folder.mkdir()
    (folder / path.name).write_text(text)
    (folder / path.name).chmod(0o600)
    data, new = path.with_name("..data"), path.with_name("..data_tmp")
    new.symlink_to(folder.name)
    new.rename(data)
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        path.symlink_to(Path(data.name) / path.name)


@pytest.mark.parametrize("change", [edit, rename_over, swap_data])
def test_a_changed_file_is_taken_once_it_has_settled(place: Place, change: Callable[[Path, str], None]) -> None:
    if change is swap_data:
        swap_data(place.path, RIGHT)
    with place.agent() as agent:
        for _ in range(3):
            agent.look()
        assert place.enforced.targets_ms == [50]
        change(place.path, OTHER)
        agent.look()
        assert place.enforced.targets_ms == [50], "it may still be being written"
        for _ in range(3):
            agent.look()
        assert place.enforced.targets_ms == [50, 60]
        change(place.path, RIGHT)
        agent.look()
        agent.look()
        assert place.enforced.targets_ms == [50, 60, 50]
        assert place.enforced.running == 1


def test_a_file_that_is_written_bit_by_bit_is_read_when_it_is_whole(place: Place) -> None:
    with place.agent() as agent:
        for length in range(10, len(OTHER), 40):
            place.path.write_text(OTHER[:length])
            agent.look()
        place.path.write_text(OTHER)
        agent.look()
        assert (place.enforced.targets_ms, place.pipeline.policy.error) == ([50], None)
        agent.look()
        assert place.enforced.targets_ms == [50, 60]


def test_a_wrong_file_changes_nothing_and_is_logged_once_with_its_lines(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with place.agent() as agent:
        read_at = place.pipeline.policy.wall_ns
        edit(place.path, WRONG)
        for _ in range(5):
            agent.look()
        (logged,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert logged.startswith("policy not reloaded, the old one stays in force: ")
        for place_of_it in (f"{place.path}:5: ", f"{place.path}:8: "):
            assert place_of_it in logged
            assert place_of_it in (place.pipeline.policy.error or "")
        assert (place.enforced.targets_ms, place.enforced.running) == ([50], 1)
        assert place.pipeline.policy.wall_ns == read_at
        rename_over(place.path, OTHER)
        agent.look()
        agent.look()
        assert place.pipeline.policy.error is None
        assert (place.pipeline.policy.wall_ns or 0) > (read_at or 0)


def test_a_deleted_file_keeps_the_old_policy_and_is_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with place.agent() as agent:
        place.path.unlink()
        for _ in range(3):
            agent.look()
        assert place.enforced.running == 1
        assert "No such file" in (place.pipeline.policy.error or "")
        assert sum("the old one stays in force" in record.getMessage() for record in caplog.records) == 1
        agent.reload()
        assert place.enforced.running == 1
        place.write(RIGHT)
        agent.look()
        agent.look()
        assert (place.enforced.targets_ms, place.pipeline.policy.error) == ([50], None)


def test_others_permission_to_write_it_is_a_wrong_file_and_chmod_cures_that(place: Place) -> None:
    with place.agent() as agent:
        place.path.chmod(0o666)
        agent.look()
        agent.look()
        assert "can be written by every user" in (place.pipeline.policy.error or "")
        place.path.chmod(0o600)
        agent.look()
        agent.look()
        assert place.pipeline.policy.error is None


def test_a_file_with_the_same_policy_changes_nothing_and_a_requested_reload_restarts_enforcement(place: Place) -> None:
    with place.agent() as agent:
        edit(place.path, RIGHT + "# a comment\n")
        agent.look()
        agent.look()
        assert place.enforced.targets_ms == [50]
        agent.reload()
        assert place.enforced.targets_ms == [50, 50]
        agent.look()
        agent.look()
        assert place.enforced.targets_ms == [50, 50], "what was just read is no change"


def test_a_policy_that_appears_later_is_taken(place: Place) -> None:
    place.path.unlink()
    with place.agent() as agent:
        for _ in range(3):
            agent.look()
        agent.reload()
        assert (place.pipeline.policy.error, place.pipeline.policy.wall_ns) == (None, None)
        place.write(WRONG)
        agent.look()
        agent.look()
        assert place.pipeline.policy.error is not None
        place.write(OTHER)
        agent.look()
        agent.look()
        assert place.enforced.targets_ms == [60]
        assert place.pipeline.policy.error is None


def test_a_policy_that_cannot_be_enforced_is_reported_and_retried(place: Place) -> None:
    with place.agent() as agent:
        place.enforced.refusal = SetupError("another agent enforces here: stop it first")
        edit(place.path, OTHER)
        agent.look()
        agent.look()
        assert place.enforced.running == 0
        assert place.pipeline.policy.error == "nothing is enforced now: another agent enforces here: stop it first"
        assert place.pipeline.policy.wall_ns is None
        place.enforced.refusal = None
        os.utime(place.path)
        agent.look()
        agent.look()
        assert place.enforced.targets_ms == [50, 60]
        assert place.pipeline.policy.error is None


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def raising(error: Exception) -> Callable[..., NoReturn]:
    def act(*_: object, **__: object) -> NoReturn:
        raise error

    return act


def test_a_file_that_no_parser_expects_is_a_wrong_file(place: Place) -> None:
    with place.agent() as agent:
        edit(place.path, 'version: "\\U00110000"\n')
        agent.reload()
        assert "is not YAML" in (place.pipeline.policy.error or "")
        assert place.enforced.running == 1


def test_a_bug_while_a_file_is_read_ends_nothing_and_is_logged_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with place.agent() as agent:
        place.check = raising(RuntimeError("a fault of ours"))
        edit(place.path, OTHER)
        for _ in range(4):
            agent.look()
        assert place.pipeline.policy.error == "RuntimeError('a fault of ours')"
        assert len(errors_in(caplog)) == 1
        assert place.enforced.running == 1


def test_a_file_that_cannot_be_read_now_is_retried_and_that_is_logged_once(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.agent() as agent:
        edit(place.path, OTHER)
        with monkeypatch.context() as out_of_descriptors:
            error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            out_of_descriptors.setattr("agent.config.trusted_file.read", raising(error))
            for _ in range(5):
                agent.look()
        (logged,) = errors_in(caplog)
        assert "Too many open files" in logged
        assert logged.endswith(place.pipeline.policy.error or "?")
        agent.look()
        assert (place.enforced.targets_ms, place.pipeline.policy.error) == ([50, 60], None)
        agent.look()
        agent.look()
        assert place.enforced.targets_ms == [50, 60]


def test_the_agent_has_its_file_checked_by_a_process_that_ends(place: Place) -> None:
    file = policy_file(place.path)
    assert file.load() == load(place.path)
    edit(place.path, WRONG)
    with pytest.raises(PolicyError):
        file.load()
    assert file.checked == check_file(place.path)
    place.path.chmod(0o666)
    with pytest.raises(PolicyError, match="every user"):
        file.load()


KILLED = "#!/bin/sh\nkill -KILL $$\n"
DEFECT = "#!/bin/sh\nexit 1\n"


@pytest.mark.parametrize(("program", "again"), [(KILLED, True), (DEFECT, False), (None, True)])
def test_a_file_whose_checking_was_killed_is_checked_again_and_one_that_shows_a_defect_is_not(
    place: Place, monkeypatch: pytest.MonkeyPatch, program: str | None, again: bool
) -> None:
    file, python = policy_file(place.path), place.path.with_name("python")
    if program is not None:
        python.write_text(program)
        python.chmod(0o755)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(python))
        with pytest.raises(PolicyError, match="cannot be checked"):
            file.load()
    assert file.changed() == again
    assert file.load() == load(place.path)


def test_each_requested_reload_is_answered_with_why_it_was_refused(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with place.agent() as agent:
        edit(place.path, WRONG)
        agent.reload()
        agent.reload()
        assert len(errors_in(caplog)) == 2


def test_a_requested_reload_is_answered_with_its_outcome(place: Place) -> None:
    with place.agent() as agent:
        right = agent.reload()
        assert (right.exit_code, right.text.splitlines()[0]) == (
            0,
            f"the policy of {place.path} is in force: {SUMMARY}",
        )
        edit(place.path, WRONG)
        wrong = agent.reload()
        assert wrong.exit_code == 2
        assert [line.split(":")[1] for line in wrong.text.splitlines() if "error:" in line] == ["5", "8"]
        assert "    8 |     match: {contaner: training}" in wrong.text.splitlines()
        assert wrong.text.endswith("\nthe policy was not reloaded: the old one stays in force")
        place.write(RIGHT)
        place.enforced.refusal = SetupError("another agent enforces here: stop it first")
        refused = agent.reload()
        assert (refused.exit_code, refused.text) == (3, f"nothing is enforced now: {place.enforced.refusal}")
        place.enforced.refusal = KeyError("a fault of ours")
        assert agent.reload().exit_code == 1
        place.path.unlink()
        gone = agent.reload()
        assert (gone.exit_code, gone.text) == (3, f"there is no policy at {place.path}: observing only")


def test_all_waiting_requests_are_answered_and_one_that_comes_meanwhile_waits_for_the_next_reload(place: Place) -> None:
    woken: list[None] = []
    asked = ReloadRequests(lambda: woken.append(None))
    answers: list[tuple[str, ReloadOutcome]] = []
    for name in "ab":
        asked.order(lambda outcome, name=name: answers.append((name, outcome)))  # type: ignore[misc]
    with place.agent() as agent:

        def slowly() -> ReloadOutcome:
            asked.order(lambda outcome: answers.append(("c", outcome)))
            return agent.reload()

        asked.carry_out(slowly)
        assert [name for name, _ in answers] == ["a", "b"]
        assert {outcome.exit_code for _, outcome in answers} == {0}
        asked.carry_out(agent.reload)
        assert [name for name, _ in answers] == ["a", "b", "c"]
        assert len(woken) == 3
        asked.carry_out(agent.reload)  # a signal, with no request to answer
        assert len(answers) == 3


@pytest.mark.parametrize("at_end", [False, True])
def test_a_fault_in_the_middle_of_a_reload_ends_no_agent_and_leaves_nothing_in_force(
    place: Place, caplog: pytest.LogCaptureFixture, at_end: bool
) -> None:
    with place.agent() as agent:
        fault = KeyError("a fault of ours")
        place.enforced.refusal, place.enforced.fault_at_end = (None, fault) if at_end else (fault, None)
        place.pipeline.publish(EnforcementReport(enforcing=True))
        agent.reload()
        assert place.pipeline.policy.error == "nothing is enforced now: KeyError('a fault of ours')"
        assert (agent.policy, place.pipeline.policy.wall_ns, place.pipeline.enforcement.enforcing) == (
            None,
            None,
            False,
        )
        assert place.enforced.running == 0
        assert caplog.records[-1].exc_info is not None
        place.enforced.refusal = place.enforced.fault_at_end = None
        agent.reload()
        assert place.enforced.targets_ms == [50, 50]
        assert place.pipeline.policy.error is None


def test_a_start_that_fails_leaves_no_policy_in_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, observer = DecisionHistory(), cast(Any, SimpleNamespace(proc=Procfs()))
    monkeypatch.setattr("enforce.service.signals", raising(RuntimeError("no signals")))
    policy = parse(RIGHT.replace("version: 1\n", "version: 1\nenforce: true\n"), "p")
    settings = EnforcementSettings(tmp_path, "", history, SysMonitor())
    with pytest.raises(RuntimeError), EnforcementService(policy, observer, settings):
        pass
    assert (history.has_policy, history.enforcing) == (False, False)
