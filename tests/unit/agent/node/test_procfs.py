# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What /proc means, and that nothing a process calls itself can mislead."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.containers import ContainerIndex
from agent.core.errors import GoneError, SetupError
from agent.core.model import HOST, ProcessId
from agent.core.text import printable
from agent.node.proc_parse import parse_command, parse_environ, parse_maps, parse_stat, parse_status_uid
from agent.node.procfs import Procfs

DOCKER = "3f29c1a7" * 8


def stat_line(comm: str = "python3", state: str = "S", threads: int = 4, start_ticks: int = 567) -> str:
    before = "1 100 100 0 -1 4194304 10 0 0 0 1 2 0 0 20 0"  # ppid … nice
    return f"100 ({comm}) {state} {before} {threads} 0 {start_ticks} 1000 10 18446744073709551615 1 1"


@pytest.fixture
def fixture_proc(tmp_path: Path) -> Path:
    """A /proc with init and one process in Docker."""
    for tgid, cgroup in ((1, "/init.scope"), (100, f"/docker/{DOCKER}")):
        folder = tmp_path / str(tgid)
        folder.mkdir()
        (folder / "stat").write_text(stat_line() + "\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "cmdline").write_bytes(b"python3\0train.py\0--epochs=9\0")
        (folder / "status").write_text("Name:\tpython3\nUid:\t0\t0\t0\t0\n")
        (folder / "environ").write_bytes(b"HOME=/root\0CUDA_VISIBLE_DEVICES=1,0\0")
    (tmp_path / "self").mkdir()
    return tmp_path


@given(st.text(st.characters(exclude_characters="\n\0"), max_size=64))
def test_a_name_cannot_forge_a_start_time(comm: str) -> None:
    stat = parse_stat(stat_line(comm))
    assert (stat.comm, stat.state, stat.parent_tgid, stat.threads, stat.start_ticks) == (comm, "S", 1, 4, 567)


@pytest.mark.parametrize("text", ["", "1", "1 (a", "1 (a) S 1 2", ") 1 2 3", stat_line().replace("567", "x")])
def test_what_is_no_stat_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the message is never shown
        parse_stat(text)


def test_a_zombie_is_dead_unless_threads_of_it_still_run() -> None:
    assert parse_stat(stat_line(state="Z", threads=1)).dead
    assert parse_stat(stat_line(state="X", threads=0)).dead
    assert not parse_stat(stat_line(state="Z", threads=3)).dead
    assert not parse_stat(stat_line(state="T", threads=1)).dead


def test_a_name_cannot_forge_a_user() -> None:
    assert parse_status_uid("Name:\ta\x85Uid:\t0\t0\nUid:\t1000\t0\t0\t0\n") == 1000
    assert parse_status_uid("Name:\ta\n") is None


def test_a_command_line_is_one_printable_line() -> None:
    assert parse_command("python3\0train.py\0", 80) == "python3 train.py"
    assert parse_command("a\0\0b\0", 80) == "a  b"
    assert parse_command("a\x1b[2J\nb\u202e\udcff\0", 80) == "a\\x1b[2J\\x0ab\\u202e\\xff"
    assert parse_command("", 80) == ""


@given(st.text(st.characters(codec=None)), st.integers(1, 300))
def test_printable_text_is_printable_and_bounded(text: str, longest: int) -> None:
    safe = printable(text, longest)
    assert len(safe) <= longest
    assert all(char.isprintable() or char.isspace() for char in safe)
    assert not set(safe) & set("\n\r\t\x1b\u2028")


def test_a_unix_socket_listens_until_it_is_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "a b")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        assert not Procfs().listens_at(os.getpid(), path)
        listening.listen()
        assert Procfs().listens_at(os.getpid(), path)
        assert not Procfs().listens_at(os.getpid(), str(tmp_path / "a"))
    assert not Procfs().listens_at(os.getpid(), path)
    assert os.path.exists(path)


def test_of_a_variable_set_twice_the_first_counts() -> None:
    text = "A=1\0B=x=y\0A=2\0junk\0"
    assert parse_environ(text, {"A", "B", "C", "junk"}) == {"A": "1", "B": "x=y"}


def test_each_mapped_copy_of_a_library_is_found_once() -> None:
    text = (
        "7f00-7f10 r-xp 00000000 fd:01 42                   /usr/lib/x86_64-linux-gnu/libcuda.so.535.1\n"
        "7f10-7f20 r--p 00010000 fd:01 42                   /usr/lib/x86_64-linux-gnu/libcuda.so.535.1\n"
        "7f20-7f30 r-xp 00000000 103:00001 7                /a b\\012/libcuda.so.1 (deleted)\n"
        "7f30-7f40 r-xp 00000000 fd:01 43                   /usr/lib/libc.so.6\n"
        "7f40-7f50 rw-p 00000000 00:00 0                    [heap]\n"
        "7f50-7f60 rw-p 00000000 00:00 0 \n"
    )
    first, second = parse_maps(text, lambda name: name.startswith("libcuda.so"))
    assert (first.path, first.device, first.inode, first.deleted) == (
        "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1",
        0xFD01,
        42,
        False,
    )
    assert (second.path, second.device, second.deleted) == ("/a b\n/libcuda.so.1", 0x103 << 8 | 1, True)


def test_a_process_is_read_from_a_tree_of_fixtures(fixture_proc: Path) -> None:
    proc = Procfs(str(fixture_proc))
    assert sorted(proc.tgids()) == [1, 100]
    assert proc.process_id(100) == ProcessId(100, 567)
    assert proc.command(100) == "python3 train.py --epochs=9"
    assert proc.user(100) == "root"
    assert proc.environ(100, {"CUDA_VISIBLE_DEVICES"}) == {"CUDA_VISIBLE_DEVICES": "1,0"}


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_that_cannot_be_read_for_lack_of_something_is_not_taken_for_gone(
    fixture_proc: Path, monkeypatch: pytest.MonkeyPatch, lack: int
) -> None:
    def refuse(*_args: object, **_more: object) -> None:
        raise OSError(lack, os.strerror(lack))

    proc = Procfs(str(fixture_proc))
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(SetupError, match="cannot be read now"):
        proc.stat(100)
    assert proc.is_alive(ProcessId(100, 567))


def test_a_process_without_arguments_is_shown_by_its_name(fixture_proc: Path) -> None:
    (fixture_proc / "100" / "cmdline").write_bytes(b"")
    assert Procfs(str(fixture_proc)).command(100) == "[python3]"


def test_a_user_unknown_here_is_a_number(fixture_proc: Path) -> None:
    (fixture_proc / "100" / "status").write_text("Uid:\t987654\t0\t0\t0\n")
    assert Procfs(str(fixture_proc)).user(100) == "987654"


def test_a_reused_pid_is_another_process(fixture_proc: Path) -> None:
    proc = Procfs(str(fixture_proc))
    assert proc.is_alive(ProcessId(100, 567))
    assert not proc.is_alive(ProcessId(100, 566))
    assert not proc.is_alive(ProcessId(101, 567))


@pytest.mark.parametrize("read", ["stat", "process_id", "command", "user", "cgroup"])
def test_reading_a_process_that_is_gone_raises_its_own_error(fixture_proc: Path, read: str) -> None:
    with pytest.raises(GoneError):
        getattr(Procfs(str(fixture_proc)), read)(4711)


def test_the_index_names_the_container_and_remembers_it(fixture_proc: Path) -> None:
    index = ContainerIndex(Procfs(str(fixture_proc)))
    process = ProcessId(100, 567)
    assert index.container_of(process).id == DOCKER
    assert index.container_of(ProcessId(1, 567)).key == HOST
    (fixture_proc / "100" / "cgroup").unlink()
    assert index.container_of(process).id == DOCKER
    index.forget([process])
    with pytest.raises(GoneError):
        index.container_of(process)


def test_the_index_blames_no_later_process_under_the_same_pid(fixture_proc: Path) -> None:
    with pytest.raises(GoneError):
        ContainerIndex(Procfs(str(fixture_proc))).container_of(ProcessId(100, 566))


def test_a_dead_process_that_left_its_cgroup_is_not_the_hosts(fixture_proc: Path) -> None:
    (fixture_proc / "100" / "stat").write_text(stat_line(state="Z", threads=1))
    (fixture_proc / "100" / "cgroup").write_text("0::/\n")
    with pytest.raises(GoneError):
        ContainerIndex(Procfs(str(fixture_proc))).container_of(ProcessId(100, 567))


def test_the_index_forgets_the_longest_unasked_first(fixture_proc: Path) -> None:
    index = ContainerIndex(Procfs(str(fixture_proc)), most_processes=1)
    index.container_of(ProcessId(1, 567))
    index.container_of(ProcessId(100, 567))
    assert len(index) == 1
    (fixture_proc / "100" / "cgroup").unlink()
    assert index.container_of(ProcessId(100, 567)).id == DOCKER


def test_start_times_are_what_the_probes_carry_of_them() -> None:
    assert parse_stat(stat_line(start_ticks=(1 << 32) + 567)).start_ticks == 567
