# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The process that reads symbols for `gpuwarden stacks`: what becomes of one that hangs, breaks or is taken over."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from agent.core.errors import SetupError
from agent.stacks.symbolizer import Bcc

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's rights")


class Making(Protocol):
    """Writes the module."""

    def __call__(self, body: str, before: str = "") -> None: ...


@pytest.fixture
def bcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Making:
    """Puts a module in bcc's place: what `resolve` does with a process's files, in Python instead of C++."""

    def make(body: str, before: str = "") -> None:
        indented = body.replace("\n", "\n        ")
        text = f"{before}\nclass SymbolCache:\n    def __init__(self, tgid):\n        self.tgid = tgid\n"
        text += f"    def resolve(self, address, demangle):\n        {indented}\n"
        (tmp_path / "bcc.py").write_text(text)

    python = tmp_path / "python"  # isolated as it is asked to be (-I), but for that module
    python.write_text(f'#!/bin/sh\n[ "$1" = -I ] && shift && exec env PYTHONPATH={tmp_path} {sys.executable} -P "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    tmp_path.chmod(0o755)
    return make


def test_without_bcc_the_error_names_its_package(bcc: Making) -> None:
    bcc("pass", before="raise ImportError('no such thing')")
    with pytest.raises(SetupError, match=r"apt-get install python3-bpfcc.*no such thing"):
        Bcc()


@ROOT_ONLY
def test_names_come_back_whatever_is_in_them(bcc: Making) -> None:
    bcc("return {1: b'main', 2: b'a\\n\\x1b[2J\\xff', 3: b'x' * 100000, 4: None}[address], 0, b'module'")
    with closing(Bcc()) as names:
        assert names.name(7, 1) == "main"
        assert names.name(7, 2) == "a\n\x1b[2J\\xff"  # frames.py makes it printable
        assert names.name(7, 3) == "x" * 4096
        names.renew()
        assert names.name(7, 4) is None
        assert names.trouble is None


@ROOT_ONLY
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import time; time.sleep(1000)", "took longer than 2 s"),
        ("import os; os._exit(1)", "it ended"),
        ("import os; os.kill(os.getpid(), 11)", "it ended"),
        ("import os; os.write(1, b'nonsense\\n')", "not JSON"),
        ("import os; os.write(1, b'x' * 200000)", "no end"),
    ],
)
def test_one_that_hangs_or_breaks_is_given_up_and_not_asked_again(bcc: Making, body: str, why: str) -> None:
    bcc(body)
    with closing(Bcc()) as names:
        names._patience_seconds = 2.0
        assert names.name(7, 1) is None
        assert names.trouble is not None
        assert why in names.trouble
        assert names.name(7, 1) is None


TAKEN_OVER = """
import ctypes, fcntl, json, os, resource, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
bpf, queue, queue_to_thread = (321, 129, 297) if os.uname().machine == 'x86_64' else (280, 138, 240)
me, siginfo = os.getpid(), ctypes.create_string_buffer(128)  # what it may not do even to itself it may do to no process
owner = (ctypes.c_int * 2)(1, me)  # F_OWNER_PID
acts = {
    'write the memory of another process': lambda: open('/proc/%d/mem' % self.tgid, 'r+b', buffering=0),
    'write a file of root': lambda: open(target, 'w'),
    'write any file': lambda: os.open('/tmp', os.O_TMPFILE | os.O_RDWR),
    'trace another process': lambda: check(libc.ptrace(0x4206, self.tgid, 0, 0)),
    'end another process': lambda: os.kill(self.tgid, 0),
    'end another process by its descriptor': lambda: os.pidfd_open(self.tgid),
    'end itself': lambda: os.kill(me, 0),
    'queue a signal': lambda: check(libc.syscall(queue, me, 0, siginfo)),
    'queue a signal for a thread': lambda: check(libc.syscall(queue_to_thread, me, me, 0, siginfo)),
    'have a signal sent': lambda: fcntl.fcntl(0, fcntl.F_SETOWN, me),
    'have a signal sent to a group': lambda: check(libc.fcntl(0, 15, owner)),
    'choose the signal': lambda: fcntl.fcntl(0, fcntl.F_SETSIG, 9),
    'change the limits of a process': lambda: resource.prlimit(me, resource.RLIMIT_CORE),
    'run a program': lambda: os.execv('/bin/true', ['true']),
    'begin a process': lambda: os.fork(),
    'connect': lambda: socket.socket(socket.AF_UNIX),
    'become root': lambda: os.setuid(0),
    'mount': lambda: check(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None)),
    'enter the namespaces of another process': lambda: check(libc.setns(os.open(f'/proc/{self.tgid}/ns/mnt', 0), 0)),
    'make namespaces': lambda: check(libc.unshare(0x10000000)),
    'load programs into the kernel': lambda: check(libc.syscall(bpf, 0, 0, 0)),
}
def check(result):
    if result:
        raise OSError(ctypes.get_errno(), 'refused')
done = []
for what, act in acts.items():
    try:
        act()
        done.append(what)
    except OSError:
        pass
fcntl.fcntl(0, fcntl.F_GETFL), resource.getrlimit(resource.RLIMIT_CORE)  # its own are no matter
reads = os.listdir('/proc/%d/root' % self.tgid) and open('/proc/%d/maps' % self.tgid).read() and open(secret).read()
return json.dumps([done, bool(reads)]).encode(), 0, b'module'
"""


@ROOT_ONLY
def test_one_that_is_taken_over_can_read_files_and_do_nothing(bcc: Making, tmp_path: Path) -> None:
    secret, target = tmp_path / "of a container", tmp_path / "target"
    secret.write_text("read")
    secret.chmod(0o600)
    bcc(TAKEN_OVER.strip(), before=f"secret, target = {str(secret)!r}, {str(target)!r}")
    with closing(Bcc()) as names:
        answer = names.name(os.getpid(), 1)
        assert answer is not None, names.trouble
        assert json.loads(answer) == [[], True]
    assert not target.exists()
