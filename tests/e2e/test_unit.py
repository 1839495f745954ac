# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The life of the unit under a real systemd, in its sandbox: start, pings, a hang, a power cut, a reload, the end.

The offline work is another user's, and its target one that nobody can meet: it is paced and frozen, so each end of the
agent has something to undo.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from agent import endpoint
from agent.model import Enforcement, Snapshot
from enforce import ledger
from enforce.entries import Entry
from tests.e2e.machine import CHECKOUT, Machine, machine
from tests.e2e.node import ROOT, until

UNIT = "gpuwarden.service"
WATCHDOG_SECONDS = 3
_GPU = f"GPUSIM_DIR=/var/lib/gpusim LD_LIBRARY_PATH={CHECKOUT}/sim/build/lib"
_WORK = f"{CHECKOUT}/sim/build/bin"

# What is ours to choose on a test machine; everything else is as it is shipped.
DROP_IN = f"""\
[Service]
Environment={_GPU}
WatchdogSec={WATCHDOG_SECONDS}s
RestartSec=100ms
"""
GPU = f"[Service]\nEnvironment={_GPU}\nExecStartPre=mkdir -p /var/lib/gpusim\nExecStart={_WORK}/gpusim serve\n"
CHAT = f"""\
[Service]
Environment={_GPU}
ExecStart={_WORK}/online --rate 50 --kernels 4 --kernel-us 500 --seconds 3600 --start-now
"""
TRAINING = f"""\
[Service]
Environment={_GPU}
User=65534
ExecStart={_WORK}/offline --kernels 20 --kernel-us 500 --seconds 3600
"""
POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {unit: chat.service}
    slo: {signal: gpu_wait, quantile: 0.99, target: 1ms, window: 10s}
offline:
  - name: training
    match: {unit: training.service}
    limits: {max_pause: 1s, floor: 50%}
    ladder: [gate, pace, freeze]
"""


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    files = {
        "/etc/gpuwarden/policy.yaml": POLICY,
        f"/usr/lib/systemd/system/{UNIT}": (ROOT / "packaging/systemd" / UNIT).read_text(),
        f"/etc/systemd/system/{UNIT}.d/test.conf": DROP_IN,
        "/etc/systemd/system/gpu.service": GPU,
        "/etc/systemd/system/chat.service": CHAT,
        "/etc/systemd/system/training.service": TRAINING,
    }
    with machine(f"gpuwarden-unit-{os.getpid()}", tmp_path_factory.mktemp("unit") / "m", files) as made:
        made.systemctl("start", "gpu")
        until(lambda: (made.root / "var/lib/gpusim/gpusim.sock").exists(), "the simulated GPU")
        made.systemctl("start", "chat", "training")
        yield made


@pytest.fixture
def started(systemd: Machine) -> Machine:
    """With the unit running, whatever a test did to it."""
    systemd.systemctl("start", UNIT)
    return systemd


def snapshot(systemd: Machine) -> Snapshot | None:
    return endpoint.fetch(systemd.root / "run/gpuwarden/agent.sock")


def stance(systemd: Machine) -> Enforcement | None:
    """Of the offline unit."""
    now = snapshot(systemd)
    rows = [row for row in now.containers if row.container.name == "training.service"] if now else []
    return now.enforcement.get(rows[0].container.key) if now and rows else None


def is_held(systemd: Machine) -> bool:
    """Whether it is paced and frozen by turns."""
    found = stance(systemd)
    return found is not None and "freeze" in found.rungs and found.pauses_total > 0


def is_frozen(systemd: Machine) -> bool:
    return (systemd.root / "sys/fs/cgroup/system.slice/training.service/cgroup.freeze").read_text() == "1\n"


def until_held(systemd: Machine) -> None:
    until(lambda: is_held(systemd), "the offline unit to be paced and frozen")
    until(lambda: is_frozen(systemd), "it to stand still", step=0.005)


def outstanding(systemd: Machine) -> list[Entry]:
    return ledger.read(systemd.root / "run/gpuwarden/ledger.jsonl")


def launches(systemd: Machine) -> int:
    """Of the offline unit, as they really happened."""
    said = systemd.run("env", *_GPU.split(), f"{_WORK}/gpusim", "truth").stdout
    [pid] = systemd.show("training", "MainPID")
    return next(int(found[1]) for line in said.splitlines() if f'"pid":{pid},' in line.replace(" ", "")
                and (found := re.search(r'"launches": ?(\d+)', line)))  # fmt: skip


def assert_it_runs(systemd: Machine) -> None:
    before = launches(systemd)
    until(lambda: launches(systemd) > before + 20, "the offline unit to go on")


def is_let_hurry(systemd: Machine) -> bool:
    """Whether systemd could raise the limit: not where this machine itself may not."""
    [pid] = systemd.show(UNIT, "MainPID")
    limits = (systemd.root / f"proc/{pid}/limits").read_text()
    return re.search(r"^Max nice priority +40 ", limits, re.MULTILINE) is not None


def restarts(systemd: Machine) -> int:
    [count] = systemd.show(UNIT, "NRestarts")
    return int(count)


def test_start_waits_until_the_agent_answers_and_what_it_does_is_its_status(started: Machine) -> None:
    assert started.show(UNIT, "ActiveState", "SubState", "Type") == ["active", "running", "notify"]
    assert snapshot(started) is not None
    until_held(started)
    until(lambda: started.show(UNIT, "StatusText") == ["enforcing: 2 containers on 1 device"], "the status")
    missing = re.findall(r"(CAP_\w+) is missing", started.journal())
    assert missing == ([] if is_let_hurry(started) else ["CAP_SYS_NICE"])  # the sandbox leaves all else that it needs


def test_pings_come_while_ticks_and_decisions_are_completed(started: Machine) -> None:
    before, [first] = restarts(started), started.show(UNIT, "WatchdogTimestampMonotonic")
    time.sleep(WATCHDOG_SECONDS + 1)  # the time that passes is what is tested
    [later] = started.show(UNIT, "WatchdogTimestampMonotonic")
    assert int(later) - int(first) > WATCHDOG_SECONDS * 1_000_000
    assert restarts(started) == before


def test_an_agent_that_hangs_is_ended_and_started_again_and_the_release_ran(started: Machine) -> None:
    until_held(started)
    before, [hanging] = restarts(started), started.show(UNIT, "MainPID")
    started.run("kill", "-STOP", hanging)
    until(lambda: restarts(started) == before + 1, "systemd to start it again")
    until(lambda: started.show(UNIT, "SubState") == ["running"], "the new agent to be ready")
    assert started.show(UNIT, "MainPID") != [hanging]
    said = started.journal()
    assert "Watchdog timeout" in said
    assert "entries looked at" in said
    until_held(started)


def test_when_agent_and_guardian_die_at_once_the_release_undoes_everything_from_inside_the_sandbox(
    started: Machine,
) -> None:
    until_held(started)
    before, told = restarts(started), len(started.journal())
    started.write(f"/run/systemd/system/{UNIT}.d/later.conf", "[Service]\nRestartSec=1min\n")
    started.systemctl("daemon-reload")
    until(lambda: is_frozen(started), "it to stand still", step=0.005)
    started.systemctl("kill", "--kill-whom=all", "--signal=KILL", UNIT)
    until(lambda: started.show(UNIT, "SubState") == ["auto-restart"], "the unit to wait for its restart")
    assert re.search(r"freeze: .*: resumed", started.journal()[told:])
    assert not is_frozen(started)
    assert outstanding(started) == []
    assert_it_runs(started)
    (started.root / f"run/systemd/system/{UNIT}.d/later.conf").unlink()
    started.systemctl("daemon-reload")
    started.systemctl("restart", UNIT)
    assert restarts(started) <= before + 1


def test_reload_takes_a_changed_policy_and_the_agent_is_ready_again_afterwards(started: Machine) -> None:
    told, agent = len(started.journal()), started.show(UNIT, "MainPID")
    started.write("/etc/gpuwarden/policy.yaml", POLICY.replace("enforce: true", "enforce: false"))
    started.systemctl("reload", UNIT)
    until(lambda: "policy reloaded" in started.journal()[told:], "the policy to be taken")
    until(lambda: started.show(UNIT, "SubState") == ["running"], "the reload to be over")
    assert started.show(UNIT, "MainPID") == agent
    assert outstanding(started) == []
    started.write("/etc/gpuwarden/policy.yaml", POLICY)
    started.systemctl("reload", UNIT)
    until_held(started)


def test_stop_releases_everything_and_leaves_nobody_behind(started: Machine) -> None:
    until_held(started)
    started.systemctl("stop", UNIT)
    found = started.show(UNIT, "ActiveState", "Result", "ExecMainStatus")
    assert found == ["inactive", "success", "0"]
    group = started.root / "sys/fs/cgroup/system.slice" / UNIT
    assert not group.exists() or (group / "cgroup.procs").read_text() == ""
    assert outstanding(started) == []
    assert not is_frozen(started)
    assert_it_runs(started)
