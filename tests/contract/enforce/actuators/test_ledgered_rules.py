# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The entry of a removed rule stays in the ledger while a real process is stopped, frozen or both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.node.procfs import Procfs
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from enforce.actuators.launch.ledgered_rules import LedgeredRules
from enforce.ledger.ledger import Ledger, read
from enforce.model import Target
from tests.support.groups import Group, group, process_of
from tools.harness.wait import until


@pytest.fixture
def v1() -> Iterator[Group]:
    with group(1) as made:
        yield made


def test_a_process_that_a_v1_freezer_froze_while_it_was_stopped_keeps_its_entry(v1: Group, tmp_path: Path) -> None:
    tgid = v1.spinner()
    path = tmp_path / "ledger"
    rules = LedgeredRules("pace", Ledger(path), Procfs())
    rules.put(Target(process_of(tgid), v1.key, (0,), None), lambda: None)
    with Cgroup(FreezerCgroup.of(1, str(v1.folder))) as cgroup:
        cgroup.freeze()
        until(cgroup.is_frozen, "the freezer")
        os.kill(tgid, signal.SIGSTOP)  # is delivered when it thaws
        rules.remove(process_of(tgid), lambda: None)
        rules.maintain(0)
        assert [entry.act for entry in read(path)] == ["pace"]
        cgroup.thaw()
    until(lambda: Procfs().stat(tgid).state == "T", "the stop")
    rules.maintain(0)
    assert [entry.act for entry in read(path)] == ["pace"]
    os.kill(tgid, signal.SIGCONT)
    until(lambda: Procfs().stat(tgid).state not in "TD", "it to run")
    rules.maintain(0)
    assert read(path) == []
