# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One item's process: its rows are kept, its time is limited, and nothing that it began outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from conformance import process_tree
from conformance.host import OVERDUE, Host, path_with_control
from conformance.isolation import RUN_VARIABLE, WHOLE, ItemRunner
from conformance.report.model import Row, Verdict
from tests.support.groups import roots
from tools.harness import cgroups
from tools.harness.wait import until

BEGINNING = """\
import os, signal, subprocess, sys, time
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--run") + 1])
descriptor = int(sys.argv[sys.argv.index("--rows-to") + 1])
def row(what):
    text = '{"item": "machine", "what": "%s", "verdict": "ok"}\\n' % what
    os.write(descriptor, text.encode())
row("first")
"""
DAEMON = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    os._exit(0)
os.setsid()
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""

LIMIT_SECONDS = 10.0  # more than a program takes to begin on a machine that stalls
FREEZING = {
    1: ("freezer.state", "FROZEN", "freezer.state", "FROZEN"),
    2: ("cgroup.freeze", "1", "cgroup.events", "frozen 1"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    with suppress(ProcessLookupError):  # only where it failed
        for process in process_tree.with_variable(f"{RUN_VARIABLE}={tmp_path}"):
            process_tree.send(process, signal.SIGKILL)


def attempt(folder: Path, program: str, seconds: float = 60.0) -> list[Row]:
    """Rows of an item that does this."""
    script = folder / "item.py"
    script.write_text(BEGINNING + program)
    with (folder / "log.txt").open("wb") as log:
        return list(ItemRunner(folder, log, {}, False, program=(sys.executable, str(script))).rows("machine", seconds))


def verdicts(rows: list[Row]) -> list[tuple[str, Verdict]]:
    return [(row.what, row.verdict) for row in rows]


def begun(folder: Path) -> list[process_tree.Process]:
    return process_tree.with_variable(f"{RUN_VARIABLE}={folder}")


def is_gone(pid: str) -> bool:
    """Also when its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def content(path: Path) -> str:
    """Of a file that another process writes."""
    return until(lambda: path.read_text() if path.exists() else "", f"content of {path}")


def test_rows_come_through(folder: Path) -> None:
    rows = attempt(folder, 'row("second")\nprint("a word for the log")')
    assert verdicts(rows) == [("first", Verdict.OK), ("second", Verdict.OK)]
    assert "a word for the log" in (folder / "log.txt").read_text()


def test_what_came_before_the_limit_is_kept(folder: Path) -> None:
    rows = attempt(folder, "time.sleep(600)", seconds=LIMIT_SECONDS)
    assert verdicts(rows) == [("first", Verdict.OK), (WHOLE, Verdict.FAILED)]
    assert rows[-1].note == "not done within its 10 s: ended"
    assert not begun(folder)


def test_an_item_that_is_ended_can_clean_up(folder: Path) -> None:
    attempt(
        folder,
        """
def leave(*_):
    raise SystemExit(1)
signal.signal(signal.SIGTERM, leave)
try:
    time.sleep(600)
finally:
    (folder / "cleaned").write_text("yes")
""",
        seconds=LIMIT_SECONDS,
    )
    assert (folder / "cleaned").read_text() == "yes"


def test_a_stopped_item_and_its_stopped_child_end(folder: Path) -> None:
    program = """
child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
(folder / "child").write_text(str(child.pid))
os.kill(os.getpid(), signal.SIGSTOP)
"""
    rows = attempt(folder, program, seconds=LIMIT_SECONDS)
    assert verdicts(rows)[0] == ("first", Verdict.OK)
    assert is_gone((folder / "child").read_text())


def test_a_daemon_that_hid_and_ignores_signals_ends_and_is_reported(folder: Path) -> None:
    (folder / "daemon.py").write_text(DAEMON)
    program = """
subprocess.run([sys.executable, folder / "daemon.py", folder / "pid"])
while not (folder / "pid").exists() or not (folder / "pid").read_text():
    time.sleep(0.01)
"""
    rows = attempt(folder, program)
    assert verdicts(rows) == [("first", Verdict.OK), ("nothing is left running", Verdict.FAILED)]
    assert "python" in rows[-1].note
    assert is_gone((folder / "pid").read_text())


@pytest.mark.parametrize("version", [1, 2])
def test_what_an_item_left_frozen_is_thawed_and_ends(folder: Path, version: int) -> None:
    if os.geteuid() != 0 or version not in roots():
        pytest.skip("it needs root, and a freezer of that version")
    group = roots()[version] / f"gpuwarden-test-{os.getpid()}-{version}"
    name, value, asked, frozen = FREEZING[version]
    program = f"""
box = Path({str(group)!r}, "box")
box.mkdir(parents=True)
child = subprocess.Popen(["sleep", "600"])
(box / "cgroup.procs").write_text(str(child.pid))
(box / {name!r}).write_text({value!r})
while {frozen!r} not in (box / {asked!r}).read_text():
    time.sleep(0.01)
(folder / "child").write_text(str(child.pid))
os._exit(1)
"""
    try:
        rows = attempt(folder, program)
    finally:
        cgroups.empty(f"/{group.name}")
        left = group.exists()
        cgroups.remove(f"/{group.name}", ())
    assert verdicts(rows) == [("first", Verdict.OK), (WHOLE, Verdict.FAILED)]
    assert "exit status 1" in rows[1].note
    assert is_gone((folder / "child").read_text())
    assert not left


@pytest.mark.parametrize(
    ("end", "expected"), [("sys.exit(3)", "exit status 3"), ("os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV")]
)
def test_an_item_that_dies_reports_how(folder: Path, end: str, expected: str) -> None:
    rows = attempt(folder, end)
    assert verdicts(rows) == [("first", Verdict.OK), (WHOLE, Verdict.FAILED)]
    assert expected in rows[-1].note


def test_what_is_no_row_costs_no_other(folder: Path) -> None:
    rows = attempt(folder, 'os.write(descriptor, b"nonsense\\n")\nrow("first")\nrow("last")')
    assert [row.verdict for row in rows] == [Verdict.OK, Verdict.FAILED, Verdict.FAILED, Verdict.OK]
    assert "nonsense" in rows[1].note
    assert rows[3].what == "last"


def test_what_does_not_die_is_reported_once_and_not_waited_for_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a driver that hangs: here nothing ends it."""
    monkeypatch.setattr(process_tree, "_TERM_SECONDS", 0.05)
    monkeypatch.setattr(process_tree, "_KILL_SECONDS", 0.05)
    monkeypatch.setattr(process_tree, "send", lambda *_: None)
    script = folder / "item.py"
    script.write_text(BEGINNING + 'subprocess.Popen(["sleep", "600"], start_new_session=True)')
    with (folder / "log.txt").open("wb") as log:
        made = ItemRunner(folder, log, {}, False, program=(sys.executable, str(script)))
        first, again = list(made.rows("machine", 20.0)), made.sweep()
    monkeypatch.undo()
    process_tree.end(begun(folder))
    assert ("what is killed dies", Verdict.FAILED) in verdicts(first)
    assert "sleep" in first[1].note
    assert again == []


def test_processes_of_other_programs_are_not_ended(folder: Path) -> None:
    with subprocess.Popen(["sleep", "600"], env={**os.environ, RUN_VARIABLE: f"{folder}-2"}) as other:
        process = next(p for p in process_tree.named("sleep") if p.pid == other.pid)
        process_tree.send(process_tree.Process(other.pid, process.started - 1), signal.SIGKILL)
        assert not begun(folder)
        assert other.poll() is None
        other.kill()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(
        simulated=False,
        quick=True,
        folder=tmp_path,
        libcuda=None,
        libnvml=None,
        workloads=tmp_path,
        bpf_objects=tmp_path,
        bpf="not here",
        python=sys.executable,
        environment={"GPU_OF": "ours"},
    )
    yield made
    made.end_all()


def test_a_program_gets_its_input_and_environment(host: Host) -> None:
    script = "import os, sys; print(os.environ['GPU_OF'], os.environ['MORE'], sys.stdin.read()); sys.exit(7)"
    done = host.run([sys.executable, "-c", script], {"MORE": "too"}, given="said")
    assert (done.returncode, done.stdout) == (7, "ours too said\n")


def test_a_program_that_takes_too_long_ends_with_its_children(host: Host, tmp_path: Path) -> None:
    inner = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    run = f"s.run([sys.executable, '-c', {inner!r}, sys.argv[1]])"
    outer = f"import subprocess as s, sys; print('begun', flush=True); {run}"
    done = host.run([sys.executable, "-c", outer, str(tmp_path / "pid")], timeout=LIMIT_SECONDS)
    assert done.returncode == OVERDUE
    assert done.stdout == "begun\n"
    assert "not done within 10 s" in done.stderr
    pid = content(tmp_path / "pid")
    until(lambda: is_gone(pid), "the end of the killed child")


def test_a_stopped_program_ends_with_the_item(host: Host) -> None:
    process = host.start([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    host.end_all()
    assert process.returncode == -signal.SIGTERM


def test_modules_of_the_frameworks_python_are_found_without_being_imported(host: Host) -> None:
    assert host.has("json.decoder")
    assert not host.has("no_such.module")
    assert not host.has("no_such")


def test_programs_of_mps_are_looked_for_beside_the_path_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/theirs:/usr/bin")
    assert path_with_control() == "/theirs:/usr/bin:/usr/local/nvidia/bin:/run/nvidia/driver/usr/bin"
