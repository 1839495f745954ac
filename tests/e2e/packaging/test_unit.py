# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The life of the unit under a real systemd, in its sandbox: start, pings, a hang, a power cut, a reload, the end.

A systemd of its own needs a PID namespace of its own, where the agent enforces nothing, and reports that. What it would
have left in force when it died is done by a program of ours, in the ledger's way.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator

import pytest

from agent.core.model import Snapshot
from agent.exporters.api.client import fetch
from agent.node.preflight import SINCE_6_6, UPROBE_MULTI, kernel_version
from enforce.ledger import ledger
from enforce.ledger.entries import LedgerEntry
from tests.e2e.node import ROOT
from tests.e2e.packaging.machine import CHECKOUT, HOME, PYTHON, Machine, machine
from tools.harness.wait import until

UNIT = "gpuwarden.service"

WITHOUT_ADMIN = kernel_version(platform.release()) >= UPROBE_MULTI

WATCHDOG_SECONDS = 15

_GPU = f"GPUSIM_DIR=/var/lib/gpusim LD_LIBRARY_PATH={CHECKOUT}/sim/build/lib:{PYTHON}/lib"

_WORK = f"{CHECKOUT}/sim/build/bin"

_STATUS = re.compile(r"observing: \d+ containers on 1 device")

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


PARK = """\
import os, signal, sys, time
from agent.core.model import ContainerKey
from agent.node.procfs import Procfs
from enforce.ledger.entries import LedgerEntry
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from enforce.ledger.ledger import Ledger
process = Procfs().process_id(int(sys.argv[1]))
place = FreezerCgroup.of(2, "/sys/fs/cgroup/system.slice/training.service")
key, now = ContainerKey("systemd:/system.slice/training.service"), time.time_ns()
ledger = Ledger("/run/gpuwarden/ledger.jsonl")
ledger.intend(LedgerEntry.of("pace", process, key, now))
ledger.intend(LedgerEntry.at("freeze", str(place), key, now))
os.kill(process.tgid, signal.SIGSTOP)
while Procfs().stat(process.tgid).state != "T":
    time.sleep(0.001)
with Cgroup(place) as cgroup:
    assert cgroup.claim()
    cgroup.freeze()
    while not cgroup.is_frozen():
        time.sleep(0.001)
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
    return fetch(systemd.root / "run/gpuwarden/agent.sock")


def park(systemd: Machine) -> None:
    """Stops the offline process and freezes its cgroup, as an agent does that dies right afterwards."""
    [pid] = systemd.show("training", "MainPID")
    done = systemd.run(f"{HOME}/bin/python3", "-c", PARK, pid)
    assert done.returncode == 0, done.stderr
    assert is_frozen(systemd)


def is_frozen(systemd: Machine) -> bool:
    return "frozen 1" in (systemd.root / "sys/fs/cgroup/system.slice/training.service/cgroup.events").read_text()


def is_stopped(systemd: Machine) -> bool:
    [pid] = systemd.show("training", "MainPID")
    return (systemd.root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def outstanding(systemd: Machine) -> list[LedgerEntry]:
    return ledger.read(systemd.root / "run/gpuwarden/ledger.jsonl")


def launches(systemd: Machine) -> int:
    """Of the offline unit, as they really happened."""
    output = systemd.run("env", *_GPU.split(), f"{_WORK}/gpusim", "truth").stdout
    [pid] = systemd.show("training", "MainPID")
    return next(int(row["launches"]) for row in map(json.loads, output.splitlines()) if row["pid"] == int(pid))


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
    until(lambda: _STATUS.fullmatch(started.show(UNIT, "StatusText")[0]), "its status")
    missing = re.findall(r"(CAP_\w+) is missing", started.journal())
    assert missing == ([] if is_let_hurry(started) else ["CAP_SYS_NICE"])  # the sandbox leaves all else that it needs


def test_in_a_pid_namespace_of_its_own_it_enforces_nothing_and_logs_why(started: Machine) -> None:
    journal = started.journal()
    assert "enforce: true, and nothing is enforced: this is not the node's own PID namespace" in journal
    now = snapshot(started)
    assert now is not None
    assert not now.enforcing
    assert outstanding(started) == []
    assert_it_runs(started)


def test_pings_come_while_ticks_and_decisions_are_completed(started: Machine) -> None:
    def pinged_us() -> int:
        return int(started.show(UNIT, "WatchdogTimestampMonotonic")[0])

    before, first_us = restarts(started), pinged_us()
    until(lambda: pinged_us() - first_us > WATCHDOG_SECONDS * 1_000_000, "pings for longer than it may be silent")
    assert restarts(started) == before


def test_an_agent_that_hangs_is_ended_and_started_again_and_the_release_ran(started: Machine) -> None:
    before, [hanging] = restarts(started), started.show(UNIT, "MainPID")
    park(started)
    stopped = started.run("kill", "-STOP", hanging)
    assert (stopped.returncode, restarts(started)) == (0, before), "systemd has started another one already"
    until(lambda: restarts(started) > before, "systemd to start it again")
    until(lambda: started.show(UNIT, "SubState") == ["running"], "the new agent to be ready")
    assert started.show(UNIT, "MainPID") != [hanging]
    until(lambda: "Watchdog timeout" in started.journal(), "the reason")
    until(  # journald reads its output later. All threads need not be there: others may run while they are written
        lambda: re.search(
            r"Fatal Python error: Aborted\s.*thread 0x\w+ \(most recent call first\)", started.journal(), re.S | re.I
        ),
        lambda: f"where it hung, in its log:\n{started.journal()}",
    )
    until(lambda: "2 processes resumed, 2 entries looked at" in started.journal(), "the release to say so")
    assert_it_runs(started)


def test_when_all_of_it_dies_at_once_the_release_undoes_everything_from_inside_the_sandbox(started: Machine) -> None:
    earlier = len(started.journal())
    park(started)
    started.systemctl("kill", "--kill-whom=all", "--signal=KILL", UNIT)
    until(lambda: not is_frozen(started) and not is_stopped(started), "the offline unit to be let go")
    until(lambda: "entries looked at" in started.journal()[earlier:], "the release to say so")
    journal = started.journal()[earlier:]
    assert re.search(r": freeze: .*: resumed", journal)
    assert re.search(r": pace: process \d+: resumed", journal)
    assert outstanding(started) == []
    assert_it_runs(started)


def test_reload_takes_a_changed_policy_and_the_agent_is_ready_again_afterwards(started: Machine) -> None:
    earlier, agent = len(started.journal()), started.show(UNIT, "MainPID")
    started.write("/etc/gpuwarden/policy.yaml", POLICY.replace("enforce: true", "enforce: false"))
    started.systemctl("reload", UNIT)
    until(lambda: "policy reloaded" in started.journal()[earlier:], "the policy to be taken")
    until(lambda: started.show(UNIT, "SubState") == ["running"], "the reload to be over")
    assert started.show(UNIT, "MainPID") == agent


@pytest.mark.skipif(not WITHOUT_ADMIN, reason="before Linux 6.6 probes need CAP_SYS_ADMIN")
def test_with_ambient_capabilities_it_observes_as_another_user(started: Machine) -> None:
    names = " ".join(name for name in SINCE_6_6 if name != "CAP_SYS_NICE")
    lines = ["[Service]", "User=65534", "Group=gpuwarden", "CapabilityBoundingSet=", f"CapabilityBoundingSet={names}"]
    started.write(f"/run/systemd/system/{UNIT}.d/user.conf", "\n".join([*lines, f"AmbientCapabilities={names}\n"]))
    started.systemctl("daemon-reload")
    started.systemctl("restart", UNIT)
    [pid] = started.show(UNIT, "MainPID")
    assert "Uid:\t65534\t65534\t65534\t65534\n" in (started.root / f"proc/{pid}/status").read_text()
    now = snapshot(started)
    assert now is not None
    assert any(probed.attached for probed in now.probes)


def test_stop_ends_all_of_it(started: Machine) -> None:
    started.systemctl("stop", UNIT)
    found = started.show(UNIT, "ActiveState", "Result", "ExecMainStatus")
    assert found == ["inactive", "success", "0"]
    group = started.root / "sys/fs/cgroup/system.slice" / UNIT
    assert not group.exists() or (group / "cgroup.procs").read_text() == ""
    assert (started.root / "run/gpuwarden").is_dir()  # where a later `release` looks
    assert_it_runs(started)
