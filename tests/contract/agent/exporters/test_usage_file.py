# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The ledger's file, with the real SQLite: killed writers, readers meanwhile, files that are none, full disks."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from agent.core.errors import SetupError
from agent.core.model import ContainerUsage, Snapshot, Totals, Usage
from agent.core.registry import Listeners, LossRegistry
from agent.exporters.usage.query import By, Report, read
from agent.exporters.usage.recorder import UsageRecorder, keep
from agent.exporters.usage.store import MIGRATIONS
from tests.support.snapshots import GPU_0, container, rich_snapshot
from tools.harness.wait import until

EVER = 1 << 40
WRITER = """
import sys, time
from pathlib import Path
from agent.core.model import ContainerUsage, Snapshot, Totals, Usage
from agent.exporters.usage.recorder import UsageRecorder
from tests.support.snapshots import GPU_0, container

with UsageRecorder(Path(sys.argv[1]), flush_seconds=0.02) as recorder:
    n = 0
    while True:
        n += 1
        usage = Usage(GPU_0, None, None, None, None, None, None, Totals(n / 4, n, 3 * n, 5 * n))
        owner = container("web", "web")
        recorder.record(Snapshot(0, time.time_ns(), 1, containers=(ContainerUsage(owner, (usage,), ()),)))
        if n % 1000 == 0:
            print(n, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.sqlite"


@pytest.fixture
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[4]
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        yield process
        process.kill()


def everything(path: Path) -> Report:
    return read(path, 0, EVER, [By.CONTAINER])


def launches(count: int, wall_ns: int = 0) -> Snapshot:
    usage = Usage(GPU_0, None, None, None, None, None, None, Totals(launches=count))
    return Snapshot(
        0, wall_ns or time.time_ns(), 1, containers=(ContainerUsage(container("web", "web"), (usage,), ()),)
    )


def test_a_killed_writer_leaves_whole_batches_that_a_reader_saw_grow(path: Path, writer: subprocess.Popen[str]) -> None:
    assert writer.stdout is not None
    assert writer.stdout.readline(), "it began"
    seen = [everything(path).total.launches]
    lines = writer.stdout

    def four_totals() -> bool:
        assert lines.readline()
        if (now := everything(path).total.launches) != seen[-1]:
            seen.append(now)
        return len(seen) == 4

    until(four_totals, lambda: f"four totals, not {seen}")
    assert seen == sorted(seen)
    writer.kill()
    printed = [int(line) for line in writer.stdout]
    writer.wait()
    total = everything(path).total
    assert total.launches >= seen[-1], "what a reader saw was lost"
    assert total.launches <= max(printed, default=1 << 60) + 1000
    assert (total.sm_seconds, total.pcie_tx_bytes, total.pcie_rx_bytes) == (
        total.launches / 4,
        total.launches * 3,
        total.launches * 5,
    ), "a batch was written in part"
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with UsageRecorder(path) as again:
        again.record(launches(7))
    assert everything(path).total.launches == total.launches + 7


def test_the_file_is_readable_by_its_group_only_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "made" / "usage.sqlite"
    before = os.umask(0)
    try:
        with UsageRecorder(path) as ledger:
            ledger.record(rich_snapshot())
            ledger.flush()
            modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"usage.sqlite": 0o640, "usage.sqlite-wal": 0o640, "usage.sqlite-shm": 0o640}
    assert path.parent.stat().st_mode & 0o777 == 0o750


def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"what another program wrote\n" * 100)
    with pytest.raises(SetupError, match=r"no usage ledger.*move it away"):
        UsageRecorder(path)
    with pytest.raises(SetupError, match="no usage ledger"):
        everything(path)
    assert path.read_bytes() == b"what another program wrote\n" * 100


def test_another_programs_database_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs (x)")
    for use in (UsageRecorder, everything):
        with pytest.raises(SetupError, match="another program's database"):
            use(path)


def test_a_newer_file_is_refused_by_writer_and_reader(path: Path) -> None:
    UsageRecorder(path).__enter__().__exit__()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    for use in (UsageRecorder, everything):
        with pytest.raises(SetupError, match=r"newer gpuwarden.*move the file away"):
            use(path)


def test_a_file_of_an_older_version_is_migrated_and_keeps_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with UsageRecorder(path) as ledger:
        ledger.record(launches(5))
    more = (*MIGRATIONS, ("ALTER TABLE usage ADD COLUMN watt_hours REAL", "DROP TABLE note"))
    monkeypatch.setattr("agent.exporters.usage.store.MIGRATIONS", more)
    UsageRecorder(path).__enter__()._store.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(more),)
        assert db.execute("SELECT launches, watt_hours FROM usage").fetchall() == [(5, None)]


def test_a_file_that_was_never_written_is_an_error_that_names_it(path: Path) -> None:
    path.touch()
    with pytest.raises(SetupError, match="is empty"):
        everything(path)


def test_no_file_is_an_error_that_names_its_writer(path: Path) -> None:
    with pytest.raises(SetupError, match="the agent writes it"):
        everything(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("agent_runs", [True, False])
def test_the_group_may_read_whether_or_not_the_agent_runs_and_others_may_not(agent_runs: bool) -> None:
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "kept" / "usage.sqlite"
        with ExitStack() as running:
            ledger = running.enter_context(UsageRecorder(path))
            ledger.record(launches(5))
            assert ledger.flush()
            if not agent_runs:
                running.close()
            for kept in (path.parent, *path.parent.iterdir()):
                os.chown(kept, 0, 4242)
            assert as_another_user(path, 4242) == "5 launches"
            assert as_another_user(path, 4243).startswith("may not use the usage ledger")


def as_another_user(path: Path, group: int) -> str:
    """What a reader of this group gets, in a child of its own."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(65534)
            answer = f"{everything(path).total.launches} launches"
        except Exception as error:  # noqa: BLE001  # whatever it is, the parent is to see it
            answer = str(error)
        os.write(writes, answer.encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path.symlink_to(target)
    with pytest.raises(SetupError, match="--usage FILE"):
        UsageRecorder(path)
    assert not target.exists()


@pytest.mark.parametrize("place", ["/proc/usage.sqlite", "/sys/gpuwarden/usage.sqlite"])
def test_where_no_file_can_be_the_agent_goes_on_and_logs_it(place: str) -> None:
    source = SimpleNamespace(listeners=Listeners[Snapshot](), losses=LossRegistry())
    with ExitStack() as stack:
        keep(source, place, 90, stack)
    assert source.listeners._listeners.all() == []
    assert source.losses.counts() == {"usage:unusable_file": 1}


def test_what_did_not_fit_on_the_disk_is_written_once_there_is_room(path: Path) -> None:
    with UsageRecorder(path, flush_seconds=3600) as ledger:
        ledger.record(launches(5))
        assert ledger.flush()
        ledger._store._db.execute("PRAGMA max_page_count = 1")  # never less than there are now: the next page is none
        crowd = tuple(
            ContainerUsage(container(f"c{n}", "c" * 500), launches(1).containers[0].usage, ()) for n in range(200)
        )
        ledger.record(Snapshot(0, time.time_ns(), 1, containers=crowd))
        assert not ledger.flush()
        assert not ledger.flush()
        assert ledger.losses()["usage:failed_writes"] == 2
        assert everything(path).total.launches == 5
        ledger._store._db.execute("PRAGMA max_page_count = 1000000")
    assert everything(path).total.launches == 205
