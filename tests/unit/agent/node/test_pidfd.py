# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A signal reaches the process that was meant or none, however often its pid passes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.errors import GoneError
from agent.core.model import ProcessId
from agent.node.pidfd import Pidfd, PidfdCache, resume_process
from agent.node.procfs import Procfs
from tests.support.processes import show_process


def me() -> ProcessId:
    return Procfs().process_id(os.getpid())


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_whose_pidfd_cannot_be_opened_now_does_not_count_as_gone(
    monkeypatch: pytest.MonkeyPatch, lack: int
) -> None:
    def refuse(_tgid: int) -> int:
        raise OSError(lack, os.strerror(lack))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match=os.strerror(lack)):
        PidfdCache(Procfs()).get(me())


@pytest.mark.parametrize("why", [errno.ESRCH, errno.EINVAL, errno.ENOENT])
def test_a_pid_that_is_no_process_is_gone(monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    def refuse(_tgid: int) -> int:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert PidfdCache(Procfs()).get(me()) is None


def test_a_process_that_took_over_the_pid_is_not_opened(tmp_path: Path) -> None:
    assert PidfdCache(Procfs()).get(ProcessId(os.getpid(), me().start_ticks - 1)) is None
    assert PidfdCache(Procfs(str(tmp_path))).get(me()) is None


def test_closed_pidfds_are_opened_again() -> None:
    pidfds = PidfdCache(Procfs())
    assert pidfds.get(me()) is not None
    pidfds.drop_all()
    assert pidfds.get(me()) is not None
    pidfds.drop_all()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_pid_that_passed_on_before_it_was_opened_is_gone_and_its_descriptor_is_closed() -> None:
    before = open_descriptors()
    with pytest.raises(GoneError):
        Pidfd(me()._replace(start_ticks=me().start_ticks + 1), Procfs())
    assert open_descriptors() == before


def test_a_pid_that_passes_on_after_it_was_opened_is_found_before_an_act_by_number(tmp_path: Path) -> None:
    show_process(tmp_path, me())
    with Pidfd(me(), Procfs(str(tmp_path))) as pidfd:
        pidfd.check()
        show_process(tmp_path, me()._replace(start_ticks=me().start_ticks + 1))
        with pytest.raises(GoneError):
            pidfd.check()


def test_a_number_that_is_no_pid_is_gone() -> None:
    with pytest.raises(GoneError):
        Pidfd(ProcessId(1 << 40, 1), Procfs())


def test_a_process_that_ends_is_reported_and_no_longer_signalled(child: subprocess.Popen[bytes]) -> None:
    with Pidfd(Procfs().process_id(child.pid), Procfs()) as pidfd:
        assert not pidfd.has_ended()
        pidfd.send(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert pidfd.has_ended()
        child.wait()
        with pytest.raises(GoneError):
            pidfd.send(signal.SIGCONT)


def test_an_ended_process_is_not_resumed_and_leaves_the_cache(child: subprocess.Popen[bytes]) -> None:
    pidfds, process = PidfdCache(Procfs()), Procfs().process_id(child.pid)
    assert resume_process(pidfds, process)
    child.kill()
    child.wait()
    assert not resume_process(pidfds, process)
    assert pidfds.prune() == []
