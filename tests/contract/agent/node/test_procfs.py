# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The real /proc of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.core.errors import GoneError
from agent.node.procfs import Procfs

PROC = Procfs()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], env={"MARK": "here"}) as process:
        yield process
        process.kill()


def test_a_process_is_itself_until_it_dies(child: subprocess.Popen[bytes]) -> None:
    identity = PROC.process_id(child.pid)
    assert PROC.is_alive(identity)
    assert PROC.command(child.pid) == "sleep 1000"
    assert PROC.environ(child.pid, {"MARK"}) == {"MARK": "here"}
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert PROC.stat(child.pid).state == "Z"
    assert not PROC.is_alive(identity)
    child.wait()
    with pytest.raises(GoneError):
        PROC.process_id(child.pid)


def test_a_process_whose_first_thread_ended_is_alive() -> None:
    code = (
        "import ctypes, threading, sys\n"
        "threading.Thread(target=lambda: sys.stdin.read()).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).syscall(60 if sys.argv[1] == 'x86_64' else 93, 0)\n"
    )
    arguments = [sys.executable, "-c", code, os.uname().machine]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        while PROC.stat(process.pid).state != "Z":  # ends: the first thread has nothing else to do
            os.sched_yield()
        alive = PROC.is_alive(PROC.process_id(process.pid))
        process.kill()
    assert alive


def test_the_c_library_is_found_with_the_device_and_inode_of_stat() -> None:
    (libc,) = PROC.mapped(os.getpid(), lambda name: name.startswith("libc.so"))
    facts = os.stat(libc.path)
    assert (libc.inode, libc.deleted) == (facts.st_ino, False)
