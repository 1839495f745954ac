# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""No act without an entry, no entry lost: whatever is torn, full, cut, shared or in the way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.core.model import ContainerKey, ProcessId
from enforce.ledger.entries import LedgerEntry, Replay, done_line, intend_line
from enforce.ledger.ledger import MAX_DEAD_LINES, Ledger, LedgerError, read


def entry(tgid: int, act: str = "pace") -> LedgerEntry:
    return LedgerEntry.of(
        act, ProcessId(tgid, 7 * tgid), ContainerKey("docker:abc"), wall_ns=1_700_000_000_000_000_000 + tgid
    )


def ids(entries: list[LedgerEntry]) -> set[str]:
    return {one.id for one in entries}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger"


def test_what_is_intended_is_outstanding_until_it_is_done(path: Path) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    ledger.intend(entry(2))
    ledger.done(entry(1).id)
    assert ids(ledger.outstanding()) == ids(Ledger(path).outstanding()) == ids(read(path)) == {entry(2).id}


def test_an_entry_comes_back_as_it_was_with_the_boot_it_belongs_to(path: Path) -> None:
    Ledger(path).intend(entry(5))
    (found,) = read(path)
    assert (found.act, found.process, found.container, found.wall_ns) == (
        "pace", ProcessId(5, 35), "docker:abc", entry(5).wall_ns,
    )  # fmt: skip
    assert found.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_what_a_process_held_on_its_devices_comes_back_with_its_entry(path: Path) -> None:
    ledger = Ledger(path)
    for number, held in enumerate((None, (), (("GPU-a", 1 << 35), ("GPU-b", 7)))):
        ledger.intend(replace(entry(number + 1, "swap"), device_bytes=held))
    assert [one.device_bytes for one in read(path)] == [None, (), (("GPU-a", 1 << 35), ("GPU-b", 7))]


def test_the_line_is_on_disk_before_intend_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path)
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_bytes()))
    ledger.intend(entry(1))
    assert [json.loads(content)["id"] for content in synced] == [entry(1).id]


def test_intending_twice_is_intending_once(path: Path) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    ledger.intend(entry(1))
    assert len(path.read_bytes().splitlines()) == 1
    ledger.done(entry(1).id)
    ledger.done(entry(1).id)
    assert ledger.outstanding() == []


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    Ledger(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o666)
    Ledger(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_others_could_have_written_is_not_undone(path: Path) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    ledger.close()
    assert ids(read(path)) == ids([entry(1)])
    for mode in (0o666, 0o660, 0o602):
        path.chmod(mode)
        assert read(path) == []


def test_a_symlink_a_pipe_and_a_folder_in_its_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(LedgerError, match="cannot be opened"):
            Ledger(tmp_path / name)
        assert read(tmp_path / name) == []
    assert (tmp_path / "victim").read_text() == "precious"


@contextmanager
def room_for(path: Path, more_bytes: int) -> Iterator[None]:
    """As on a disk that is all but full: the kernel writes what fits and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("more_bytes", [0, 1, 50])
def test_a_full_disk_means_no_act_and_leaves_no_half_line(path: Path, more_bytes: int) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    before = path.read_bytes()
    with room_for(path, more_bytes), pytest.raises(LedgerError, match="free space"):
        ledger.intend(entry(2))
    assert path.read_bytes() == before
    ledger.intend(entry(3))
    assert ids(read(path)) == ids(ledger.outstanding()) == {entry(1).id, entry(3).id}


def test_a_failed_undoing_entry_stays_outstanding(path: Path) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    with room_for(path, 5), pytest.raises(LedgerError):
        ledger.done(entry(1).id)
    assert ids(ledger.outstanding()) == {entry(1).id}


def test_a_ledger_cut_on_a_full_disk_is_written_again_once_there_is_room(path: Path) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    os.truncate(path, 0)
    with room_for(path, 5), pytest.raises(LedgerError):
        ledger.intend(entry(2))
    ledger.intend(entry(3))
    assert ids(read(path)) == {entry(1).id, entry(3).id}


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_is_passed_over_and_the_next_one_is_whole(path: Path, cut: int) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    ledger.intend(entry(2))
    ledger.close()
    os.truncate(path, path.stat().st_size - cut)
    again = Ledger(path)
    again.intend(entry(3))
    assert {entry(1).id, entry(3).id} <= ids(read(path)) == ids(again.outstanding())


def test_many_entries_are_closed_by_one_write_and_one_that_was_done_anew_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(path)
    for tgid in range(1, 101):
        ledger.intend(entry(tgid))
    released = Ledger(path)
    seen = released.outstanding()
    ledger.intend(replace(entry(7), wall_ns=1))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    released.done_if_same(seen)
    assert ids(ledger.outstanding()) == ids(read(path)) == {entry(7).id}
    assert len(synced) == 1
    released.done(entry(7).id, entry(7).id, "unknown")
    assert read(path) == []


def test_what_another_process_writes_is_seen_and_nothing_is_skipped_for_it(path: Path) -> None:
    agent, guardian = Ledger(path), Ledger(path)
    agent.intend(entry(1))
    guardian.done(entry(1).id)
    assert agent.outstanding() == []
    agent.intend(entry(1))  # it must be written again, though this ledger wrote it before
    assert ids(guardian.outstanding()) == ids(read(path)) == {entry(1).id}


def test_dead_lines_are_rewritten_away_and_other_writers_follow(path: Path) -> None:
    agent, guardian = Ledger(path), Ledger(path)
    guardian.intend(entry(9999))
    for tgid in range(1, MAX_DEAD_LINES):
        agent.intend(entry(tgid))
        agent.done(entry(tgid).id)
    assert len(path.read_bytes().splitlines()) <= MAX_DEAD_LINES + 2
    guardian.intend(entry(5000))
    assert ids(agent.outstanding()) == ids(read(path)) == {entry(9999).id, entry(5000).id}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(path.parent)) == ["ledger"]


def test_a_rewrite_that_fails_loses_nothing_and_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(9999))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "rename", refuse)
    for tgid in range(1, MAX_DEAD_LINES):
        ledger.intend(entry(tgid))
        ledger.done(entry(tgid).id)
    assert ledger.compactions_failed == 1
    assert ids(read(path)) == ids(ledger.outstanding()) == {entry(9999).id}
    assert os.listdir(path.parent) == ["ledger"]


@pytest.mark.parametrize("harm", ["remove", "cut"])
def test_a_ledger_that_is_removed_or_cut_under_its_writer_is_written_again(path: Path, harm: str) -> None:
    ledger = Ledger(path)
    ledger.intend(entry(1))
    if harm == "remove":
        path.unlink()
    else:
        os.truncate(path, 0)
    ledger.intend(entry(2))
    assert ids(read(path)) == ids(ledger.outstanding()) == {entry(1).id, entry(2).id}


def test_a_lock_that_is_held_forever_is_not_waited_for(path: Path) -> None:
    ledger = Ledger(path)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="end the one that hangs"):
            ledger.intend(entry(1))
    ledger.intend(entry(1))
    assert ids(read(path)) == {entry(1).id}


def test_an_entry_too_long_to_be_read_back_is_refused(path: Path) -> None:
    ledger = Ledger(path)
    with pytest.raises(LedgerError, match="too long"):
        ledger.intend(LedgerEntry.of("pace", ProcessId(1, 1), ContainerKey("x" * 5000), 0))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_ledger_of_something_or_nothing(content: bytes) -> None:
    replay = Replay()
    replay.add(content.split(b"\n"))
    assert replay.dead >= 0


@given(st.lists(st.binary(max_size=40).map(lambda junk: junk.replace(b"\n", b"")), max_size=5))
def test_rubbish_between_the_lines_hides_none_of_them(rubbish: list[bytes]) -> None:
    replay = Replay()
    replay.add(
        [
            intend_line(entry(1)).strip(),
            *rubbish,
            intend_line(entry(2)).strip(),
            *rubbish,
            done_line(entry(1).id).strip(),
        ]
    )
    assert entry(2).id in replay.outstanding
    assert entry(1).id not in replay.outstanding


OPS = st.lists(
    st.tuples(st.sampled_from(["intend", "done", "release", "other", "crash"]), st.integers(1, 4), st.floats(0, 1)),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@example([("intend", 2, 0.0), ("crash", 2, 0.96875), ("intend", 2, 0.0)])  # the line of `done` lacks only its end
@example([("intend", 2, 0.0), ("crash", 2, 0.96875), ("intend", 2, 0.0), ("intend", 3, 0.0)])
@given(OPS)
def test_no_act_without_an_entry_and_no_entry_lost_in_any_order_of_writes_and_crashes(
    operations: list[tuple[str, int, float]],
) -> None:
    """A crash tears the write that is under way at any byte: what was not synced may be there in part, or whole."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        ledger, other = Ledger(path), Ledger(path)
        in_force: set[str] = set()
        for operation, tgid, where in operations:
            writer = other if operation == "other" else ledger
            if operation in ("intend", "other"):
                writer.intend(entry(tgid))
                in_force.add(entry(tgid).id)
            elif operation == "done":
                in_force.discard(entry(tgid).id)  # undone first, then closed
                ledger.done(entry(tgid).id)
            elif operation == "release":  # by another process: of all up to there
                released = [one for one in other.outstanding() if one.process and one.process.tgid <= tgid]
                in_force -= ids(released)
                other.done_if_same(released)
            else:
                line = intend_line(entry(tgid)) if tgid % 2 else done_line(entry(tgid).id)
                if not tgid % 2:
                    in_force.discard(entry(tgid).id)
                with path.open("ab") as torn:
                    torn.write(line[: round(where * len(line))])
                ledger.close()
                ledger = Ledger(path)
            assert in_force <= ids(read(path))
            assert in_force <= ids(ledger.outstanding())
            assert ids(ledger.outstanding()) == ids(other.outstanding())
