# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the MPS control daemons of 535, 550 and 555 answer, and that the simulated one answers the same as each of them.

Seen on the real ones, which run without a GPU as long as no server has to be ready. The simulated 580 answers as 555,
and to device_query too.
"""

from __future__ import annotations

import stat
from typing import Final

import pytest

from tests.driver.mps_daemons import PROGRAM, Answer, Control, starting_server
from tools.harness.wait import until

NOBODY: Final = 65534

NOT_SETTABLE: Final = (
    "Insufficient privileges for UID 65534. Control deamon settings can only be modified by the user started it or by "
    "the root user.\n"
)
NO_STATUS: Final = 'Unknown command "get_server_status"\n'
NOT_FOUND: Final = "Server 1 not found\n"
ZERO: Final = "Server 0 not found\n"
NO_UID: Final = "A user id (UID) is required to start a new server\n"
NO_PID: Final = "A server PID is required\n"

SESSIONS: Final[dict[str, list[tuple[str, Answer]]]] = {
    "unknown commands": [
        ("frobnicate", 'Unknown command "frobnicate"\n'),
        ("", 'Unknown command ""\n'),
        ("help", 'Unknown command "help"\n'),
        ("get_server_list;", 'Unknown command "get_server_list;"\n'),
        ("lspart", 'Unknown command "lspart"\n'),
    ],
    "commands about a server that is not there": [
        ("get_server_list", ""),
        ("get_server_list extra words", ""),
        ("get_server_status", {535: NO_STATUS, 550: NO_PID}),
        ("get_server_status 1", {535: NO_STATUS, 550: NOT_FOUND}),
        ("get_server_status abc", {535: NO_STATUS, 550: NO_PID}),
        ("get_client_list", ZERO),
        ("get_client_list 1", NOT_FOUND),
        ("get_client_list abc", ZERO),
        ("get_device_client_list", ""),
        ("get_device_client_list 1", NOT_FOUND),
        ("get_device_client_list abc", ""),
        ("ps", "Server not found\n"),
        ("ps -x", "Server not found\n"),
        ("ps -p", ZERO + ZERO + "\n"),
        ("ps -p 1", NOT_FOUND + NOT_FOUND + "\n"),
        ("shutdown_server", ZERO),
        ("shutdown_server 1 -f", NOT_FOUND),
        ("terminate_client", ZERO + "Server 0 not found!\n1\n"),
        ("terminate_client 1 1", NOT_FOUND + "Server 1 not found!\n1\n"),
        ("get_active_thread_percentage", ZERO),
        ("get_active_thread_percentage 1", NOT_FOUND),
        ("set_active_thread_percentage abc 50", ZERO),
        ("set_active_thread_percentage 1 50", NOT_FOUND),
        ("get_device_pinned_mem_limit 1 0", NOT_FOUND),
        ("set_device_pinned_mem_limit", ZERO),
        ("set_device_pinned_mem_limit 1 0 1G", NOT_FOUND),
        ("start_server", NO_UID),
        ("start_server -uid", NO_UID),
        ("start_server x 0", NO_UID),
    ],
    "percentages": [
        ("get_default_active_thread_percentage", "100.0\n"),
        ("set_default_active_thread_percentage", "100.0\n"),
        ("set_default_active_thread_percentage 50", "50.0\n"),
        ("set_default_active_thread_percentage 0", "50.0\n"),
        ("set_default_active_thread_percentage 101", "50.0\n"),
        ("set_default_active_thread_percentage abc", "50.0\n"),
        ("set_default_active_thread_percentage -5", "50.0\n"),
        ("set_default_active_thread_percentage 33.33", "33.3\n"),
        ("set_default_active_thread_percentage 33.37", "33.4\n"),
        ("set_default_active_thread_percentage 0.04", "0.0\n"),
        ("set_default_active_thread_percentage 12.5abc", "12.5\n"),
        ("set_default_active_thread_percentage 40 extra", "40.0\n"),
        ("get_default_active_thread_percentage", "40.0\n"),
    ],
    "priorities": [
        ("get_default_client_priority", "0\n"),
        ("set_default_client_priority 1", ""),
        ("get_default_client_priority", "1\n"),
        ("set_default_client_priority 2", "Invalid priority value - must be 0 or 1!\n"),
        ("set_default_client_priority -1", "Invalid priority value - must be 0 or 1!\n"),
        ("get_default_client_priority", "1\n"),
        ("set_default_client_priority abc", ""),
        ("get_default_client_priority", "0\n"),
        ("set_default_client_priority 1x", ""),
        ("get_default_client_priority", "1\n"),
        ("set_default_client_priority", ""),
        ("get_default_client_priority", "0\n"),
    ],
    "several at once": [
        ("get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0\nps", "100.0\nServer not found\n")
    ],
}

# What is set for device 0, and what the daemon says then.
MEMORY: Final = {
    "1G": "1G\n",
    "1g": "1G\n",
    "1023M": "1023M\n",
    "512MB": "512M\n",
    "1536M": "1G\n",
    "2048M": "2G\n",
    "2049m": "2G\n",
    "81920M": "80G\n",
    "81559M": "79G\n",
    "100": "100M\n",
    "100K": "100M\n",
    "536870912": "524288G\n",
    "1.5G": "1M\n",
    "1T": "1M\n",
    "512GB": "512G\n",
    "-1M": "17179869183G\n",
    "0": "",
    "0G": "",
    "lots": "",
    "": "",
}


@pytest.mark.parametrize("session", SESSIONS)
def test_each_line_is_answered_as_by_the_real_daemon(control: Control, session: str) -> None:
    with control.daemon():
        for command, answer in SESSIONS[session]:
            assert control.ask(command) == control.expected(answer), command


def test_a_memory_limit_is_said_in_whole_gibibytes_rounded_down(control: Control) -> None:
    with control.daemon():
        for value, answer in MEMORY.items():
            assert control.ask("set_default_device_pinned_mem_limit 0 5G") == ""
            assert control.ask(f"set_default_device_pinned_mem_limit 0 {value}") == ""
            assert control.ask("get_default_device_pinned_mem_limit 0") == answer, value


def test_devices_are_taken_to_31_whether_or_not_they_exist_and_others_ignored(control: Control) -> None:
    with control.daemon():
        for device, answer in {"7": "6G\n", "31": "6G\n", "32": "", "99": "", "-1": ""}.items():
            assert control.ask(f"set_default_device_pinned_mem_limit {device} 6G") == ""
            assert control.ask(f"get_default_device_pinned_mem_limit {device}") == answer, device


def test_a_device_that_is_no_number_is_device_0_and_its_limit_is_lifted(control: Control) -> None:
    with control.daemon():
        for words in ("abc 6G", "GPU-123 6G", "0=2G"):
            assert control.ask("set_default_device_pinned_mem_limit 0 5G") == ""
            assert control.ask("get_default_device_pinned_mem_limit abc") == "5G\n"
            assert control.ask(f"set_default_device_pinned_mem_limit {words}") == ""
            assert control.ask("get_default_device_pinned_mem_limit 0") == "", words


def test_device_query_is_known_from_580_on(control: Control) -> None:
    with control.daemon():
        unknown = control.ask("device_query") == 'Unknown command "device_query"\n'
    assert unknown == (control.release < 580)


def test_another_user_may_set_defaults_on_535_alone_and_end_nothing(control: Control) -> None:
    theirs: list[tuple[str, Answer]] = [
        ("get_server_list", ""),
        ("set_default_active_thread_percentage 50", {535: "50.0\n", 550: NOT_SETTABLE}),
        ("set_default_device_pinned_mem_limit 0 1G", {535: "", 550: NOT_SETTABLE}),
        ("get_default_device_pinned_mem_limit 0", {535: "1G\n", 550: ""}),
        ("set_default_client_priority 1", {535: "", 550: NOT_SETTABLE}),
        ("get_default_client_priority", {535: "1\n", 550: "0\n"}),
        ("quit", "Not enough privilege to execute quit command\n"),
        (
            "start_server -uid 0",
            {
                535: "Insufficient privileges for UID 65534\n",
                550: "Insufficient privileges for UID 65534. Only the root user may start server for another user.\n",
            },
        ),
    ]
    with control.daemon():
        for command, answer in theirs:
            assert control.ask(command, user=NOBODY) == control.expected(answer), command


def test_root_may_set_what_another_users_daemon_has(control: Control) -> None:
    with control.daemon(user=NOBODY):
        assert control.ask("set_default_active_thread_percentage 50") == "50.0\n"
        assert control.ask("get_default_active_thread_percentage", user=NOBODY) == "50.0\n"


def test_without_a_daemon_the_exit_code_is_1_and_the_message_on_standard_error(control: Control) -> None:
    done = control.run(given="get_server_list\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "Cannot find MPS control daemon process\n")


def test_a_second_daemon_is_refused(control: Control) -> None:
    with control.daemon():
        done = control.run("-d")
    assert (done.returncode, done.stdout) == (1, "An instance of this daemon is already running\n")


def test_an_unknown_option_is_ignored_to_550_and_an_error_from_555_on(control: Control) -> None:
    with control.daemon():
        done = control.run("-p", "3", "server", "list", "--format=csv,noheader")
    assert done.returncode == (0 if control.release < 555 else 1)
    assert done.stdout.startswith("" if control.release < 555 else "CUDA MPS Control")
    assert bool(done.stdout) == (control.release >= 555)


def test_the_pipes_are_sockets_and_stay_when_the_daemon_has_ended(control: Control) -> None:
    def found() -> dict[str, str]:
        return {path.name: stat.filemode(path.lstat().st_mode) for path in control.pipes.iterdir()}

    left = {"control": "srw-rw-rw-", "control_privileged": "srwxr-xr-x", "control_lock": "-rw-rw-rw-"}
    with control.daemon():
        pid_file = {f"{PROGRAM}.pid": "-rw-rw-rw-"} if control.release >= 550 else {}
        assert found() == {**left, "log": "prwxrwxrwx", **pid_file}
    until(lambda: found() == left, lambda: f"{left}: {found()}")


def test_a_server_that_starts_answers_nothing_to_commands_about_it(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    with starting_server(control, monkeypatch) as server:
        for command in (
            f"get_active_thread_percentage {server}",
            f"set_active_thread_percentage {server} 50",
            f"get_device_pinned_mem_limit {server} 0",
            f"set_device_pinned_mem_limit {server} 0 1G",
            f"get_client_list {server}",
            f"get_device_client_list {server}",
            "get_device_client_list",
        ):
            assert control.ask(command) == "", command
        assert control.ask(f"get_server_status {server}") == control.expected({535: NO_STATUS, 550: "INITIALIZING\n"})
        assert control.ask(f"terminate_client {server} 1") == f"Server {server} not found!\n1\n"
        assert control.ask("ps") == "Server not found\n"
