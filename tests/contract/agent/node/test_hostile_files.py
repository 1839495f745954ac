# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What root in a container can put in a file's place: none of it is opened, and none leads out."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.errors import GoneError, ProbeError, SetupError
from agent.core.model import ProcessId
from agent.node import container_files
from agent.node.elf import exported_functions
from agent.node.proc_parse import MappedFile
from agent.node.procfs import Procfs
from agent.probes.libraries import FileId, Layer, opened, real_file
from tests.support.processes import Jail, Opens, jailed, mounted

PROC = Procfs()
LIBRARY = "/lib/libcuda.so.1"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes root and mounts")


@pytest.fixture
def jail(tmp_path: Path) -> Iterator[Jail]:
    (tmp_path / "secret").write_text("outside")
    root = tmp_path / "root"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "real.so").write_text("inside")
    with jailed(root) as jail:
        yield jail


def read(jail: Jail, path: str) -> str:
    with os.fdopen(PROC.open_inside(jail.process, path)) as stream:
        return stream.read()


def refused(jail: Jail, path: str = LIBRARY) -> str:
    with pytest.raises(GoneError) as error:
        os.close(PROC.open_inside(jail.process, path))
    return str(error.value)


@pytest.mark.parametrize("target", ["real.so", "/lib/real.so", "../lib/real.so", "../../../../lib/real.so"])
def test_a_link_leads_where_it_leads_the_process(jail: Jail, target: str) -> None:
    (jail.root / "lib" / "libcuda.so.1").symlink_to(target)
    assert read(jail, LIBRARY) == "inside"


@pytest.mark.parametrize("climb", ["", "../" * 20], ids=["absolute", "dots"])
def test_no_link_leads_out(jail: Jail, climb: str) -> None:
    secret = jail.root.parent / "secret"
    (jail.root / "lib" / "libcuda.so.1").symlink_to(f"{climb}{str(secret).lstrip('/') if climb else secret}")
    assert "no longer there" in refused(jail)


def test_no_dots_in_the_path_itself_lead_out(jail: Jail) -> None:
    assert "no longer there" in refused(jail, "/.." * 20 + str(jail.root.parent / "secret"))


def test_links_that_go_round_are_given_up(jail: Jail) -> None:
    (jail.root / "lib" / "libcuda.so.1").symlink_to("libcuda.so.1")
    assert os.strerror(errno.ELOOP) in refused(jail)


@pytest.mark.parametrize("link", ["/proc/self/root/etc/passwd", "/proc/self/cwd", "/proc/{pid}/fd/0"])
def test_no_link_of_proc_leads_into_another_process(jail: Jail, link: str) -> None:
    (jail.root / "proc").mkdir()
    with mounted("proc", jail.root / "proc", "-t", "proc"):
        (jail.root / "lib" / "libcuda.so.1").symlink_to(link.format(pid=os.getpid()))
        assert os.strerror(errno.ELOOP) in refused(jail)


@pytest.mark.parametrize("name", ["kmsg", "self/status", "version"])
def test_no_file_of_proc_is_opened_though_it_calls_itself_regular(jail: Jail, name: str) -> None:
    (jail.root / "proc").mkdir()
    with mounted("proc", jail.root / "proc", "-t", "proc"):
        (jail.root / "lib" / "libcuda.so.1").symlink_to(f"/proc/{name}")
        assert "holds no files of its own (proc)" in refused(jail)


def test_a_bind_mount_is_crossed_for_the_drivers_libraries_are_such(jail: Jail) -> None:
    (jail.root / "lib" / "libcuda.so.1").touch()
    with mounted(str(jail.root.parent / "secret"), jail.root / "lib" / "libcuda.so.1", "--bind"):
        assert read(jail, LIBRARY) == "outside"


def test_a_mount_over_the_folder_hides_what_was_below(jail: Jail) -> None:
    with mounted("tmpfs", jail.root / "lib", "-t", "tmpfs"):
        refused(jail, "/lib/real.so")


def _socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "a device ": lambda path: os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(7, 0)),
    "a socket": _socket,
    "a directory": os.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_not_even_opened(jail: Jail, kind: str) -> None:
    path = jail.root / LIBRARY[1:]
    KINDS[kind](path)
    with Opens(path) as opens:
        assert kind.strip() in refused(jail)
        assert not opens.any()


def test_the_word_of_opens_is_right(jail: Jail) -> None:
    with Opens(jail.root / "lib" / "real.so") as opens:
        assert read(jail, "/lib/real.so") == "inside"
        assert opens.any()


def test_a_file_with_a_lease_of_another_process_is_not_waited_for(jail: Jail) -> None:
    path = jail.root / LIBRARY[1:]
    path.touch()
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the holder learns of another open
    try:
        with open(path, "w") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            assert os.strerror(errno.EAGAIN) in refused(jail)
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    finally:
        signal.signal(signal.SIGIO, before)


def test_another_process_under_the_same_pid_is_not_looked_into(jail: Jail) -> None:
    before = replace(jail, process=ProcessId(jail.process.tgid, jail.process.start_ticks - 1))
    assert "another one has its pid" in refused(before, "/lib/real.so")
    assert PROC.gpu_minors(before.process) is None


def test_what_was_found_is_what_is_opened_whatever_has_its_name_by_then(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = jail.root / "lib" / "real.so", container_files._file_system

    def replaced(descriptor: int) -> int:
        path.unlink()
        os.mkfifo(path)
        return look(descriptor)

    monkeypatch.setattr(container_files, "_file_system", replaced)
    assert read(jail, "/lib/real.so") == "inside"


def test_a_folder_on_the_way_that_keeps_being_moved_costs_a_few_tries(jail: Jail) -> None:
    """The kernel gives up (EAGAIN) where `..` and a rename meet; a program that renames all day gains nothing."""
    (jail.root / "a" / "b").mkdir(parents=True)
    (jail.root / "a" / "real.so").write_text("inside")
    ending = threading.Event()

    def rename() -> None:
        while not ending.is_set():
            os.rename(jail.root / "a", jail.root / "c")
            os.rename(jail.root / "c", jail.root / "a")

    renaming = threading.Thread(target=rename)
    renaming.start()
    try:
        for _ in range(200):
            with suppress(GoneError):
                assert read(jail, "/a/b/../real.so") == "inside"
    finally:
        ending.set()
        renaming.join()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_where_openat2_is_refused_nothing_is_opened_and_the_reason_is_reported(
    jail: Jail, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(container_files, "_openat2", lambda *_: (-1, code))
    with pytest.raises(SetupError, match=r"allow openat2\(2\) in the seccomp profile"):
        PROC.open_inside(jail.process, "/lib/real.so")


def test_a_file_that_is_not_for_us_is_no_matter_of_openat2(jail: Jail, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_folder: int, path: bytes, _how: object) -> tuple[int, int]:
        return (os.dup(0), 0) if path == b"/" else (-1, errno.EPERM)

    monkeypatch.setattr(container_files, "_openat2", refuse)
    with pytest.raises(SetupError, match="not allowed to read"):
        PROC.open_inside(jail.process, "/lib/real.so")


@pytest.mark.parametrize(
    "name", ["/lib/" + "\x1b[2J\n\u202e" * 40, "/" + "a/" * 5000, "/lib/\udcff\udcfe", "", "/lib/\0"]
)
def test_a_path_of_odd_characters_or_any_length_is_no_more_than_missing(jail: Jail, name: str) -> None:
    refused(jail, name)


def test_what_is_deleted_is_opened_where_it_is_mapped_and_as_nothing_else(jail: Jail) -> None:
    (libc,) = PROC.mapped(os.getpid(), lambda name: name.startswith("libc.so"))
    me = PROC.process_id(os.getpid())
    with pytest.raises(GoneError, match="does not map"):  # it is there: its link does not end in (deleted)
        PROC.open_mapped(me, libc)
    for span in ("0-1000", "../root", "x"):
        with pytest.raises(GoneError):
            PROC.open_mapped(me, MappedFile("/etc/passwd", 0, 0, True, span))


def test_of_a_dev_with_any_number_of_entries_nothing_is_believed(jail: Jail, monkeypatch: pytest.MonkeyPatch) -> None:
    (jail.root / "dev").mkdir()
    (jail.root / "dev" / "nvidia3").touch()
    assert PROC.gpu_minors(jail.process) == frozenset({3})
    monkeypatch.setattr("agent.node.procfs._MOST_DEVICES", 40)
    for number in range(40):
        (jail.root / "dev" / f"nvidia{number}x").touch()
    assert PROC.gpu_minors(jail.process) is None


def test_a_dev_that_is_a_link_leads_to_no_folder_of_the_node(jail: Jail, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia7").touch()
    (jail.root / "dev").symlink_to(tmp_path / "dev")
    assert PROC.gpu_minors(jail.process) is None


def test_a_sparse_file_without_an_end_is_no_library(jail: Jail) -> None:
    path = jail.root / LIBRARY[1:]
    path.write_bytes(b"\x7fELF\x02\x01\x01")
    os.truncate(path, 1 << 40)
    with opened(PROC, jail.process, LIBRARY) as file, pytest.raises(ProbeError, match="larger than any"):
        exported_functions(file.descriptor, "cu")


def test_a_file_that_grows_while_it_is_read_ends(jail: Jail) -> None:
    path = jail.root / LIBRARY[1:]
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(200))
    ending = threading.Event()

    def grow() -> None:
        with open(path, "ab") as file:
            while not ending.is_set() and file.tell() < 64 << 20:
                file.write(bytes(1 << 16))

    growing = threading.Thread(target=grow)
    growing.start()
    try:
        with opened(PROC, jail.process, LIBRARY) as library:
            for _ in range(20):
                with suppress(ProbeError):
                    exported_functions(library.descriptor, "cu")
    finally:
        ending.set()
        growing.join()


# Layers of an overlay: the text is the mounter's, the names below are the container's.


def test_a_link_in_a_layer_passes_no_file_of_the_node_off_as_the_containers(tmp_path: Path) -> None:
    layer, real = tmp_path / "layer", tmp_path / "node"
    for folder in (layer, real):
        folder.mkdir()
    (real / "libcuda.so.1").write_text("same")
    (layer / "opt").symlink_to(real)
    facts = os.stat(real / "libcuda.so.1")
    assert real_file(facts, [Layer(str(real), "libcuda.so.1")]) == FileId(facts.st_dev, facts.st_ino)
    mine = os.stat_result((*facts[:1], 4711, *facts[2:]), {"st_mtime_ns": facts.st_mtime_ns})
    assert real_file(mine, [Layer(str(layer), "opt/libcuda.so.1")]) == FileId(mine.st_dev, 4711)
    assert real_file(mine, [Layer(str(layer), "../node/libcuda.so.1")]) == FileId(mine.st_dev, 4711)


_UNSHARED = """
import os, sys
print(flush=True)
sys.stdin.read()
"""


def test_mounts_made_in_a_user_namespace_of_ones_own_are_not_believed() -> None:
    assert not PROC.mounts_by_itself(PROC.process_id(os.getpid()))
    command = ["unshare", "--user", "--map-root-user", "--mount", "python3", "-c", _UNSHARED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        if process.stdout.readline() != b"\n":
            pytest.skip("no user namespaces here")
        assert PROC.mounts_by_itself(PROC.process_id(process.pid))
        process.kill()


def test_an_overlay_of_a_user_namespace_is_not_taken_for_the_file_that_its_text_names(tmp_path: Path) -> None:
    """Its lower folder has the name of the node's one, and a file as large and as old as the node's."""
    node = tmp_path / "node"
    node.mkdir()
    (node / "libcuda.so.1").write_text("the node's")
    facts = os.stat(node / "libcuda.so.1")
    seconds, rest_ns = divmod(facts.st_mtime_ns, 10**9)  # a float would not hold it
    script = (
        f"mount -t tmpfs none {node} && mkdir {tmp_path}/up {tmp_path}/work {tmp_path}/merged && "
        f"printf 'a forgery.' >{node}/libcuda.so.1 && touch -d @{seconds}.{rest_ns:09} {node}/libcuda.so.1 && "
        f"mount -t overlay none {tmp_path}/merged -o lowerdir={node}:{tmp_path}/up && echo ready && exec cat"
    )
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        line = process.stdout.readline()
        if line != b"ready\n":
            pytest.skip("no overlay in user namespaces here")
        with opened(PROC, PROC.process_id(process.pid), f"{tmp_path}/merged/libcuda.so.1") as theirs:
            assert theirs.version == (facts.st_size, facts.st_mtime_ns)
            assert theirs.file != FileId(facts.st_dev, facts.st_ino)
        process.kill()
