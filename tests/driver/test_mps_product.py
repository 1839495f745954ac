# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The product on NVIDIA's own MPS control daemons: it finds them, and sets and undoes the limits of servers to come."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from agent.node.procfs import Procfs
from enforce.actuators.mps.channel import MpsChannel
from enforce.actuators.mps.daemons import daemons
from enforce.actuators.mps.model import Daemon, MpsClient, MpsControl, MpsError, MpsServer, MpsSetting, Scope
from enforce.actuators.mps.protocol2 import reads_as
from enforce.actuators.mps.protocol3 import Protocol3, connect
from enforce.actuators.mps.restore import LimitChange, put_back
from enforce.ledger.entries import UndoOutcome
from tests.driver.mps_daemons import Control, starting_server
from tools.harness.wait import until

PROC = Procfs()
PATIENCE_SECONDS = 60.0
NOBODY = 65534
TO_COME = Scope("")


def found(control: Control, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """As the product finds it among all processes; with the program that belongs to it."""
    for name, value in control.environment.items():
        monkeypatch.setenv(name, value)
    (daemon,) = (one for one in daemons(PROC) if one.pipe_directory == str(control.pipes))
    assert not daemon.contested
    return replace(daemon, program=str(control.program))


def spoken(control: Control, monkeypatch: pytest.MonkeyPatch) -> MpsControl:
    return connect(found(control, monkeypatch), PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("what", "before", "ours", "back"),
    [
        ("percentage", "100", "35", "100"),
        ("memory", "", "512M", "81920M"),
        ("memory", "", "1536M", "81920M"),
        ("memory", "", "2048M", "81920M"),
        ("priority", "0", "1", "0"),
    ],
)
def test_a_limit_is_set_verified_and_put_back(
    control: Control, monkeypatch: pytest.MonkeyPatch, what: str, before: str, ours: str, back: str
) -> None:
    with control.daemon():
        spoke = spoken(control, monkeypatch)
        assert (spoke.protocol, spoke.servers(), spoke.clients(), spoke.scopes()) == (2, (), (), (TO_COME,))
        (setting,) = spoke.settings(TO_COME, (0,))[what]
        change = LimitChange(setting, before, ours, back)
        assert spoke.get(setting) == before
        spoke.put(setting, ours)
        assert change.is_ours(spoke.get(setting))
        assert put_back(spoke, change) is UndoOutcome.RESTORED
        assert reads_as(setting, spoke.get(setting), back)
        assert put_back(spoke, change) is UndoOutcome.RUNNING


def test_ordinals_are_unknown_where_there_is_no_device_query_and_all_else_works(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    with control.daemon():
        spoke = spoken(control, monkeypatch)
        assert len(spoke.devices()) == (1 if control.release >= 580 else 0)
        assert not any(spoke.device_clients().values())


def test_what_a_starting_server_has_is_unknown(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    with starting_server(control, monkeypatch) as server:
        spoke = spoken(control, monkeypatch)
        status = "" if control.release < 550 else "INITIALIZING"
        assert spoke.servers() == (MpsServer(str(server), server, status),)
        for what in ("percentage", "memory"):
            with pytest.raises(MpsError, match="is starting"):
                spoke.get(MpsSetting(what, Scope(str(server)), 0 if what == "memory" else None))
        with pytest.raises(MpsError, match="is starting"):
            spoke.clients()


def test_what_could_not_be_done_is_an_error_though_the_exit_code_is_0(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    with control.daemon():
        spoke = spoken(control, monkeypatch)
        with pytest.raises(MpsError, match="Server 1 not found"):
            spoke.terminate(MpsClient(1, "1"))
        for what, value in (("percentage", "50"), ("memory", "1024M")):
            with pytest.raises(MpsError, match="Server 1 not found"):
                spoke.put(MpsSetting(what, Scope("1"), 0 if what == "memory" else None), value)


def test_a_limit_that_another_user_may_not_set_is_an_error_with_the_daemons_reason(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = control.folder / "as-nobody"
    program.write_text(f"#!/bin/sh\nexec setpriv --reuid {NOBODY} --clear-groups {control.program}\n")
    program.chmod(0o755)
    with control.daemon():
        spoke = connect(replace(found(control, monkeypatch), program=str(program)), PATIENCE_SECONDS)
        for what, value in (("percentage", "50"), ("memory", "1024M"), ("priority", "1")):
            (setting,) = spoke.settings(TO_COME, (0,))[what]
            if control.release < 550:
                spoke.put(setting, value)
                continue
            with pytest.raises(MpsError, match=f"failed: Insufficient privileges for UID {NOBODY}"):
                spoke.put(setting, value)


def test_protocol_3_is_not_spoken(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    with control.daemon():
        third = Protocol3(MpsChannel(found(control, monkeypatch), PATIENCE_SECONDS))
        monkeypatch.setattr("enforce.actuators.mps.protocol3.PROTOCOLS", (Protocol3,))
        with pytest.raises(MpsError):
            connect(third.daemon, PATIENCE_SECONDS)


def test_a_daemon_is_ended_also_when_its_last_server_failed(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one exits with that server's code then, and so does `quit`."""
    if control.starter:
        (control.folder / "servers" / "nvidia-cuda-mps-server").write_text("#!/bin/sh\nexit 3\n")
    with control.daemon(starting=True):
        spoke = spoken(control, monkeypatch)
        control.ask(f"start_server -uid {os.getuid()}")
        until(lambda: not control.starter or not spoke.servers(), "the server's end")
        spoke.shut_down(MpsServer("1", 1, ""))
        until(lambda: not PROC.is_alive(spoke.daemon.process), "the daemon's end")
