# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is made of the answers of MPS control daemons: forms that real ones write, refusals, and nonsense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.core.model import DeviceUuid
from enforce.actuators.mps.channel import MpsChannel
from enforce.actuators.mps.model import Daemon, MpsClient, MpsError, MpsServer, MpsSetting, Scope
from enforce.actuators.mps.protocol2 import Protocol2
from enforce.actuators.mps.protocol3 import Protocol3, connect
from tests.support.mps import PATIENCE_SECONDS, PROC, fake


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_daemon_has_ended_whatever_its_last_servers_exit_code(tmp_path: Path, code: int) -> None:
    control = Protocol2(MpsChannel(fake(tmp_path, f"cat >/dev/null; exit {code}"), PATIENCE_SECONDS))
    control.shut_down(MpsServer("7", 7, "FAULT"))


FAULTED = """
while read -r line; do
    case "$line" in
    get_server_list) echo 7 ;;
    "get_server_status 7") echo FAULT ;;
    "get_client_list 7") echo 12 ;;
    esac
done
"""


def test_a_faulted_servers_clients_are_known_also_where_it_says_nothing_of_its_limits(tmp_path: Path) -> None:
    control = connect(fake(tmp_path, FAULTED), PATIENCE_SECONDS)
    assert control.servers() == (MpsServer("7", 7, "FAULT"),)
    assert control.clients() == (MpsClient(12, "7"),)
    with pytest.raises(MpsError, match="is starting"):
        control.get(MpsSetting("percentage", Scope("7")))


def test_a_daemon_that_lists_more_servers_than_users_can_have_is_asked_about_none_of_them(tmp_path: Path) -> None:
    daemon = fake(tmp_path, 'read -r line; [ "$line" = get_server_list ] && seq 1000 || exit 1')
    with pytest.raises(MpsError, match="1000 servers, which is malformed"):
        Protocol2(MpsChannel(daemon, PATIENCE_SECONDS)).servers()


REAL_LIST = """
while read -r line; do
    case "$line" in
    device_query) printf '%s\\n' 'Device Ordinal PCI IDs UUID Name' '0 0:01.0 GPU-aa x' '1 0:81.0 GPU-bb x' ;;
    get_device_client_list) printf '%s\\n' '[0] 01:00.0, NVIDIA H100' 12.1 13.2 '[1] 129:00.0, NVIDIA H100' 13.3 ;;
    esac
done
"""


def test_clients_are_listed_by_the_ordinals_of_their_devices(tmp_path: Path) -> None:
    control = Protocol2(MpsChannel(fake(tmp_path, REAL_LIST), PATIENCE_SECONDS))
    assert control.device_clients() == {DeviceUuid("GPU-aa"): (12, 13), DeviceUuid("GPU-bb"): (13,)}


def test_a_daemon_that_refuses_to_end_is_an_error(tmp_path: Path) -> None:
    control = Protocol2(
        MpsChannel(fake(tmp_path, "echo Not enough privilege to execute quit command"), PATIENCE_SECONDS)
    )
    with pytest.raises(MpsError, match="quit failed: Not enough privilege"):
        control.shut_down(MpsServer("7", 7, "FAULT"))


def test_the_third_language_is_not_spoken_where_it_is_answered_with_nothing(tmp_path: Path) -> None:
    daemon = fake(tmp_path, '[ "$1" = -p ] || echo "Cannot send command to MPS control daemon process"')
    with pytest.raises(MpsError, match="Cannot send command"):
        connect(daemon, PATIENCE_SECONDS)


@pytest.mark.parametrize("name", ["--force", "-f", "../../other", "a b", "x" * 200, "\x1b[2J"])
def test_a_name_that_a_daemon_gives_is_never_an_option_or_a_path(tmp_path: Path, name: str) -> None:
    script = THIRD.replace("training,1000", f"{name},1000")
    with pytest.raises(MpsError, match="is no name of a server or namespace"):
        Protocol3(MpsChannel(fake(tmp_path, script), PATIENCE_SECONDS)).servers()


@pytest.mark.parametrize("answer", ["1" * 5000, "\u00b2", "\u0663", "-1", "0", "4294967296"])
def test_a_number_that_is_none_makes_no_sense(tmp_path: Path, answer: str) -> None:
    with pytest.raises(MpsError, match="is malformed"):
        connect(fake(tmp_path, f"echo {answer}"), PATIENCE_SECONDS)


def test_an_answer_without_end_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="without end"):
        connect(fake(tmp_path, "exec yes"), PATIENCE_SECONDS)


def test_nonsense_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="is malformed"):
        connect(fake(tmp_path, "echo one two three"), PATIENCE_SECONDS)


def test_a_program_that_cannot_be_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(MpsError, match="cannot be run"):
        connect(Daemon(PROC.process_id(os.getpid()), str(tmp_path), str(tmp_path / "absent")), PATIENCE_SECONDS)


THIRD = """
[ "$1 $2" = "-p 3" ] || { echo "Unknown command"; exit 1; }
shift 2
case "$*" in
"server list "*) echo "training,1000,48201,Ready,/run/nvidia-mps/training,GPU-aa,-" ;;
"client list --all "*) echo "51023,training,0,default,python train.py"; echo "51087,training,0,low,python, eval.py" ;;
"namespace list "*) echo "low,training,Ready,4G,25.00,0,/run"; echo "default,training,Ready,-,100.00,0,/run" ;;
"namespace get low training active-thread-percentage") cat "$0.percent" ;;
"namespace set low --server=training --active-thread-percentage="*) echo "${5##*=}.00" >"$0.percent" ;;
"namespace get low training pinned-memory-limit") echo 4G ;;
"client terminate 51087") ;;
*) echo "failed: $*"; exit 1 ;;
esac
"""


def test_the_third_language_is_spoken_where_the_second_is_not_known(tmp_path: Path) -> None:
    control = connect(fake(tmp_path, THIRD), PATIENCE_SECONDS)
    assert control.protocol == 3
    assert [(server.name, server.tgid, server.status) for server in control.servers()] == [
        ("training", 48201, "ACTIVE")
    ]
    assert [(client.tgid, client.space) for client in control.clients()] == [(51023, "default"), (51087, "low")]
    low = control.scopes()[0]
    (percentage,) = control.settings(low, ())["percentage"]
    control.put(percentage, "30")
    assert control.get(percentage) == "30"
    assert control.get(MpsSetting("memory", low)) == "4096M"
    control.terminate(control.clients()[1])
    with pytest.raises(MpsError, match="failed: client terminate 51023"):
        control.terminate(control.clients()[0])
