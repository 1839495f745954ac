# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Speaking to MPS control daemons: one that works, one that hangs, one that dies, one that talks nonsense."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.errors import GoneError, SetupError
from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.mps.channel import MpsChannel
from enforce.actuators.mps.clients import AllClients, find_client, is_mps_client, terminate_client
from enforce.actuators.mps.daemons import daemons, reaches
from enforce.actuators.mps.model import (
    Daemon,
    MpsClient,
    MpsControl,
    MpsError,
    MpsSetting,
    MpsTimeoutError,
    Scope,
)
from enforce.actuators.mps.protocol2 import reads_as
from enforce.actuators.mps.protocol3 import connect
from enforce.actuators.mps.survey import survey
from tests.support.mps import PATIENCE_SECONDS, PROC, fake
from tests.support.processes import jailed, mounted
from tools.harness.node import Node, simulated_node
from tools.harness.wait import until

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="changes root and mounts")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with simulated_node(tmp_path / "gpu", {"gpus": "2"}) as node:
        for name, value in node.environment.items():
            monkeypatch.setenv(name, value)
        yield node


@pytest.fixture
def mps(node: Node) -> Iterator[Node]:
    with node.mps_daemon():
        yield node


def daemon_of(node: Node) -> Daemon:
    """Of several that other tests may be running, this node's."""
    (found,) = (one for one in daemons(PROC) if one.pipe_directory == str(node.folder / "mps"))
    return found


@pytest.fixture
def control(mps: Node) -> MpsControl:
    return connect(daemon_of(mps), PATIENCE_SECONDS)


def client_of(mps: Node) -> subprocess.Popen[str]:
    client = mps.start("offline", ["--seconds", "0", "--kernel-us", "100", "--kernels", "10"])
    assert client.stdout
    assert client.stdout.readline() == "ready\n"
    return client


def test_a_daemon_is_found_with_its_pipes_and_the_program_that_speaks_to_it(mps: Node) -> None:
    daemon = daemon_of(mps)
    assert os.path.basename(daemon.program) == "nvidia-cuda-mps-control"
    pid = (mps.folder / "mps" / "nvidia-cuda-mps-control.pid").read_text()
    assert daemon.process == PROC.process_id(int(pid))


def test_its_language_is_found_by_trying(control: MpsControl) -> None:
    assert control.protocol == 2
    (server,) = control.servers()
    assert server.status == "ACTIVE"
    assert not server.faulted


def test_a_process_is_a_client_while_it_uses_the_gpu_through_mps_and_not_otherwise(mps: Node) -> None:
    client = client_of(mps)
    process = PROC.process_id(client.pid)
    assert is_mps_client(process, PROC, PATIENCE_SECONDS)
    assert not is_mps_client(PROC.process_id(os.getpid()), PROC, PATIENCE_SECONDS)
    client.kill()
    client.wait(timeout=60)
    with pytest.raises(GoneError):
        is_mps_client(process, PROC, PATIENCE_SECONDS)


def test_a_client_can_be_ended_without_a_signal(mps: Node) -> None:
    client = client_of(mps)
    found = find_client(PROC.process_id(client.pid), PROC, PATIENCE_SECONDS)
    assert found is not None
    terminate_client(found, PROC)
    assert client.wait(timeout=60) > 0
    with pytest.raises(GoneError):
        terminate_client(found, PROC)


def test_evicting_learns_whether_it_was_a_client(mps: Node) -> None:
    client = client_of(mps)
    assert AllClients(PROC).terminate(PROC.process_id(client.pid))
    assert client.wait(timeout=60) > 0
    assert not AllClients(PROC).terminate(PROC.process_id(os.getpid()))


def test_devices_are_known_by_uuid(control: MpsControl, mps: Node) -> None:
    assert control.devices() == {device["uuid"]: index for index, device in enumerate(mps.status())}


@pytest.mark.parametrize(("what", "value"), [("percentage", "35"), ("memory", "512M"), ("priority", "1")])
def test_what_is_set_is_read_back(control: MpsControl, what: str, value: str) -> None:
    (scope,) = control.scopes()
    for setting in control.settings(scope, (0, 1))[what]:
        control.put(setting, value)
        assert control.get(setting) == value


def test_a_refused_value_is_an_error_with_the_daemons_answer(control: MpsControl) -> None:
    (scope,) = control.scopes()
    with pytest.raises(MpsError, match="0 was accepted, but it is 100"):
        control.put(MpsSetting("percentage", scope), "0")
    with pytest.raises(MpsError, match="Server 1 not found"):
        control.get(MpsSetting("percentage", Scope("1")))


@pytest.fixture(params=["535", "550", "555"])
def older(request: pytest.FixtureRequest, node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """With the daemon of a driver that has no `device_query`."""
    monkeypatch.setenv("GPUSIM_MPS_VERSION", request.param)
    with node.mps_daemon():
        yield node


def test_a_daemon_without_device_query_is_surveyed_and_only_the_ordinals_are_unknown(older: Node) -> None:
    client = client_of(older)
    process = PROC.process_id(client.pid)
    endpoints = survey(PROC, (process,), 0).endpoints
    (found,) = (one for one in endpoints if one.daemon.pipe_directory == str(older.folder / "mps"))
    assert found.error is None
    assert [server.status for server in found.servers] == ["ACTIVE"]
    assert [one for one, _ in found.connected] == [process]
    assert (found.ordinals, found.device_clients) == ((), ())


def test_a_server_that_starts_is_not_taken_for_one_without_limits_or_clients(
    mps: Node, control: MpsControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scope,) = control.scopes()
    monkeypatch.setenv("GPUSIM_MPS_STARTING", "1")
    assert [server.status for server in control.servers()] == ["INITIALIZING"]
    for what in ("percentage", "memory"):
        (setting, *_) = control.settings(scope, (0,))[what]
        with pytest.raises(MpsError, match="is starting"):
            control.get(setting)
        with pytest.raises(MpsError, match="is starting"):
            control.put(setting, "50")
    with pytest.raises(MpsError, match="is starting"):
        control.clients()


def test_a_memory_limit_that_is_no_whole_gibibyte_is_set_and_known_again(control: MpsControl) -> None:
    (scope,) = control.scopes()
    (setting,) = control.settings(scope, (0,))["memory"]
    control.put(setting, "1536M")
    assert control.get(setting) == "1024M"
    assert reads_as(setting, control.get(setting), "1536M")
    assert not reads_as(setting, control.get(setting), "2048M")


def test_a_client_that_the_daemon_did_not_end_is_an_error_though_the_exit_code_is_0(control: MpsControl) -> None:
    (server,) = control.servers()
    with pytest.raises(MpsError, match="terminate_client failed: Invalid process 1! 1"):
        control.terminate(MpsClient(1, server.name))
    with pytest.raises(MpsError, match="terminate_client failed: Server 1 not found"):
        control.terminate(MpsClient(1, "1"))


def test_a_daemon_that_dies_is_an_error_and_no_answer(mps: Node, control: MpsControl) -> None:
    os.kill(control.daemon.process.tgid, signal.SIGKILL)
    until(lambda: not PROC.is_alive(control.daemon.process), "the daemon's end")
    with pytest.raises(MpsError, match="Cannot find MPS control daemon process"):
        control.clients()


def test_ending_a_server_ends_its_clients_and_with_protocol_2_the_daemon(mps: Node, control: MpsControl) -> None:
    client = client_of(mps)
    first, second = control.devices()
    assert control.device_clients() == {first: (client.pid,), second: ()}
    control.shut_down(control.servers()[0])
    assert client.wait(timeout=60) > 0
    with pytest.raises(MpsError, match="Cannot find MPS control daemon process"):
        control.servers()


def test_a_daemon_that_hangs_is_given_up_in_bounded_time_and_the_command_program_ended(tmp_path: Path) -> None:
    daemon = fake(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 1000")
    with pytest.raises(MpsTimeoutError, match="did not answer in 2 s"):
        connect(daemon, timeout_seconds=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_lies_in_a_daemons_directory_leads_its_program_to_no_other_file(tmp_path: Path) -> None:
    """Root in a container puts links where the program, which is root of the node, is going to write."""
    pipes, outside = tmp_path / "pipes", tmp_path / "outside"
    for folder in (pipes, outside):
        folder.mkdir()
    (outside / "precious").write_text("as it was")
    (pipes / "control").symlink_to(outside / "precious")
    (pipes / "log").symlink_to(outside / "new")
    script = f"""cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
    for act in 'echo x >control' 'echo x >>control' 'echo x >log' 'mkfifo ../outside/fifo' 'rm ../outside/precious' \\
        'echo x >{outside}/new' 'mkdir {outside}/folder' 'mv {outside}/precious {outside}/gone'; do
        (eval "$act") 2>/dev/null && echo "$act"
    done
    echo x >mine && rm mine && echo "its own directory is open to it" """
    answer = MpsChannel(fake(tmp_path, script, pipes), PATIENCE_SECONDS).ask().text
    assert answer == "its own directory is open to it\n"
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "as it was"


def test_the_process_that_asks_a_daemon_is_confined_for_that_alone(tmp_path: Path) -> None:
    MpsChannel(fake(tmp_path, "true"), PATIENCE_SECONDS).ask()
    (tmp_path / "outside").write_text("still written")


@ROOT_ONLY
def test_a_directory_in_a_container_is_found_there_and_never_on_the_node(tmp_path: Path) -> None:
    root, node_s = tmp_path / "root", tmp_path / "mps"
    node_s.mkdir()
    (node_s / "of the node").touch()
    (root / "run").mkdir(parents=True)
    (root / "run" / "mps").symlink_to(node_s)
    script = 'ls "$CUDA_MPS_PIPE_DIRECTORY"'
    with jailed(root) as jail:
        daemon = replace(fake(tmp_path, script), process=jail.process, pipe_directory="/run/mps")
        with pytest.raises(MpsError, match="/run/mps of the MPS control daemon"):
            MpsChannel(daemon, PATIENCE_SECONDS).ask()
        inside = root / str(node_s).lstrip("/")
        inside.mkdir(parents=True)
        (inside / "of the container").touch()
        assert MpsChannel(daemon, PATIENCE_SECONDS).ask().text == "of the container\n"


@ROOT_ONLY
def test_no_process_reaches_the_nodes_daemon_by_a_link_in_its_container(tmp_path: Path) -> None:
    root, pipes = tmp_path / "root", tmp_path / "mps"
    pipes.mkdir()
    os.mkfifo(pipes / "control")
    (root / "run").mkdir(parents=True)
    (root / "run" / "nvidia-mps").symlink_to(pipes)
    me = PROC.process_id(os.getpid())
    with jailed(root) as jail:
        assert not reaches(jail.process, Daemon(me, str(pipes), "program"), PROC)
        (root / "run" / "nvidia-mps").unlink()
        (root / "run" / "nvidia-mps").mkdir()
        with mounted(str(pipes), root / "run" / "nvidia-mps", "--bind"):
            assert reaches(jail.process, Daemon(me, str(pipes), "program"), PROC)


def test_of_any_number_of_processes_that_call_themselves_daemons_a_few_are_asked(tmp_path: Path) -> None:
    pipes = tmp_path / "shared"
    pipes.mkdir()
    os.mkfifo(pipes / "control")
    with ExitStack() as stack:
        for number in range(24):
            own = tmp_path / f"own{number}"
            own.mkdir()
            for directory in (own, pipes):
                stack.enter_context(pretender(directory))
        found = daemons(PROC)
    assert len(found) == 16
    (shared,) = (one for one in found if one.pipe_directory == str(pipes))
    assert shared.contested


def test_that_there_are_too_many_to_ask_is_not_taken_for_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "true")  # it has no client
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    me = PROC.process_id(os.getpid())
    with ExitStack() as stack:
        for number in range(16):
            own = tmp_path / f"own{number}"
            own.mkdir()
            stack.enter_context(pretender(own))
        assert find_client(me, PROC, PATIENCE_SECONDS) is None
        stack.enter_context(pretender(tmp_path))
        with pytest.raises(MpsError, match="more than 16 processes"):
            find_client(me, PROC, PATIENCE_SECONDS)


def test_where_two_claim_a_pipe_neither_is_believed_and_nothing_is_set(mps: Node) -> None:
    client = client_of(mps)
    process = PROC.process_id(client.pid)
    with pretender(mps.folder / "mps"):
        with pytest.raises(MpsError, match="several processes claim to be the MPS control daemon at"):
            AllClients(PROC).terminate(process)
        (place,) = (one for one in survey(PROC, (process,), 0).endpoints if one.daemon.contested)
        assert place.control is None
        assert "MPS is left alone" in (place.error or "")
    assert find_client(process, PROC, PATIENCE_SECONDS) is not None


@ROOT_ONLY
def test_no_claim_stands_beside_that_of_the_nodes_root(mps: Node) -> None:
    client = client_of(mps)
    with pretender(mps.folder / "mps", user=65534):
        assert not daemon_of(mps).contested
        assert find_client(PROC.process_id(client.pid), PROC, PATIENCE_SECONDS) is not None


@ROOT_ONLY
def test_a_daemon_whose_directory_may_not_be_looked_at_keeps_no_other_from_being_found(
    mps: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS where root is nobody, or where a program serves the directory."""
    closed, me, client = tmp_path / "closed", PROC.process_id(os.getpid()), client_of(mps)
    look = Procfs.look_inside
    monkeypatch.setenv("PATH", f"{os.path.dirname(daemon_of(mps).program)}:{os.environ['PATH']}")

    def refusing(self: Procfs, process: ProcessId, path: str) -> os.stat_result:
        if path.startswith(str(closed)):
            raise SetupError("not allowed to look")
        return look(self, process, path)

    monkeypatch.setattr(Procfs, "look_inside", refusing)
    monkeypatch.setattr("enforce.actuators.mps.daemons.same_mounts", lambda *_: False)  # as in containers
    with pretender(closed):
        assert not daemon_of(mps).contested
        assert find_client(PROC.process_id(client.pid), PROC, PATIENCE_SECONDS) is not None
        assert find_client(me, PROC, PATIENCE_SECONDS) is None
        with pretender(closed) as tenant, pytest.raises(MpsError, match="not allowed to look"):
            find_client(PROC.process_id(tenant.pid), PROC, PATIENCE_SECONDS)


def test_a_daemon_that_no_program_here_can_speak_to_is_not_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pretender(tmp_path), pytest.raises(MpsError, match="cannot be run"):
        find_client(PROC.process_id(os.getpid()), PROC, PATIENCE_SECONDS)


@pytest.mark.parametrize("directory", ["relative/mps", "../../etc", "/" + "x" * 5000])
def test_a_directory_that_is_none_is_no_daemons(directory: str) -> None:
    with pretender(directory) as process:
        assert not any(one.process.tgid == process.pid for one in daemons(PROC))


@contextmanager
def pretender(directory: Path | str, user: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the name of a daemon, and the directory of one."""
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(directory)}
    words = ["nvidia-cuda-mps-control", "-f", "-c", "read word"]  # of a shell -f is an option too
    with subprocess.Popen(words, executable="/bin/sh", env=environment, stdin=-1, user=user) as process:
        # Popen returns as exec closes its pipe, a moment before the new arguments and environment can be read.
        until(lambda: b"MPS_PIPE" in Path(f"/proc/{process.pid}/environ").read_bytes(), "the pretender's environment")
        yield process
        process.kill()
