# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the product prints where it cannot work: one line that names the remedy, an exit code, and never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agent.core.errors import SetupError
from agent.node.preflight import require_probes
from tests.e2e.node import ROOT, Node

AGENT = [sys.executable, "-m", "gpuwarden"]
NOBODY = 65534

# As another user, once everything is imported: the checkout may lie where other users cannot read.
AS_NOBODY = """\
import decimal, os, sys
import gpuwarden.main, gpuwarden.run, agent.exporters.prometheus.collector, agent.exporters.status_page.routes
import agent.exporters.liveness, agent.exporters.web.config
import enforce.reload, enforce.service
os.setgroups([]); os.setgid(65534); os.setuid(65534)
gpuwarden.main.main(sys.argv[1:])
"""

WITHOUT_BTF = 'mount -t tmpfs none /sys/kernel/btf && exec "$@"'

FIVE_MISTAKES = """\
version: 1
enforce: maybe
online:
  - name: chat
    match: {container: chat}
    slo: {signal: gpu_wait, quantile: 0.99, target: 6 parsecs, window: 10s}
offline:
  - name: chat
    match: {}
    law: none-such
"""


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **(env or {})}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def refusal(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on stderr that is no log of what went well before, without the program's name."""
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith("\n")
    (line,) = [line for line in done.stderr[:-1].split("\n") if " INFO " not in line]
    assert line.startswith("gpuwarden: "), line
    return line.removeprefix("gpuwarden: ")


def start(folder: Path, *arguments: str) -> list[str]:
    """`gpuwarden run` where it disturbs no other process."""
    return [*AGENT, "run", "--run-dir", str(folder / "run"), "--listen", "127.0.0.1:0", "--usage", "off", *arguments]


def test_without_root_the_refusal_names_what_is_missing_and_sudo(node: Node, tmp_path: Path) -> None:
    done = run([sys.executable, "-c", AS_NOBODY, "run", "--run-dir", str(tmp_path)], node.environment)
    message = refusal(done, 3)
    assert message.startswith("CAP_")
    assert message.endswith("nothing works without; run with sudo, or see docs/capabilities.md")


def test_without_btf_the_refusal_names_the_missing_file_and_what_provides_it(node: Node, tmp_path: Path) -> None:
    done = run(["unshare", "--mount", "sh", "-c", WITHOUT_BTF, "sh", *start(tmp_path)], node.environment)
    message = refusal(done, 3)
    assert message.startswith("/sys/kernel/btf/vmlinux is missing")
    assert "use a distribution kernel" in message


def test_without_the_nvml_library_the_refusal_asks_to_install_the_driver(tmp_path: Path) -> None:
    message = refusal(run(start(tmp_path), {"LD_LIBRARY_PATH": ""}), 3)
    assert message.startswith("libnvidia-ml.so.1 not found")
    assert "install the NVIDIA driver" in message


def test_without_a_driver_the_refusal_asks_to_load_it(node: Node, tmp_path: Path) -> None:
    message = refusal(run(start(tmp_path), {**node.environment, "GPUSIM_DIR": str(tmp_path / "none")}), 3)
    assert message == "the NVIDIA kernel driver is not loaded: run 'modprobe nvidia', see dmesg"


def test_a_kernel_that_is_too_old_is_refused_by_its_release() -> None:
    with pytest.raises(SetupError, match=r"Linux 5\.10\.0-28-amd64 is too old: probes need 5\.15 or later; upgrade"):
        require_probes((), "5.10.0-28-amd64")
    require_probes((), "5.15.0")
    require_probes((), "10.0.1")


def test_a_port_that_is_taken_is_named_with_the_cure(node: Node, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(start(tmp_path, "--listen", f"127.0.0.1:{port}"), node.environment)
    message = refusal(done, 3)
    assert message.startswith(f"cannot serve metrics on 127.0.0.1:{port}")
    assert "choose another address or port" in message


def test_an_address_that_is_none_is_refused(node: Node, tmp_path: Path) -> None:
    message = refusal(run(start(tmp_path, "--listen", "everywhere"), node.environment), 2)
    assert message == "--listen everywhere: write ADDRESS:PORT, such as 127.0.0.1:9837"


def test_a_refusal_is_a_line_of_json_where_the_log_is(node: Node, tmp_path: Path) -> None:
    done = run(start(tmp_path, "--listen", "everywhere", "--log-format", "json"), node.environment)
    (entry,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, entry["level"], entry["logger"]) == (2, "error", "gpuwarden")
    assert entry["message"] == "gpuwarden: --listen everywhere: write ADDRESS:PORT, such as 127.0.0.1:9837"


def test_a_socket_file_that_is_something_else_is_not_removed(node: Node, tmp_path: Path) -> None:
    precious = tmp_path / "run" / "agent.sock"
    precious.parent.mkdir()
    precious.write_text("precious")
    message = refusal(run(start(tmp_path), node.environment), 3)
    assert message == f"{precious} is in the way and no socket: move it away, or choose another path"
    assert precious.read_text() == "precious"


def test_check_tells_five_mistakes_at_once_each_with_its_line_and_the_cure(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(FIVE_MISTAKES)
    done = run([*AGENT, "check", str(policy)])
    assert (done.returncode, done.stderr) == (2, "")
    lines = done.stdout[:-1].split("\n")
    beginnings = [
        "2:10: error: enforce: 'maybe' is neither",
        "6:53: error: online[0].slo.target: '6 parsecs' has the unknown unit",
        "8:5: error: offline[0].name: 'chat' is already",
        "9:5: error: offline[0].match: an empty match",
        "10:10: error: offline[0].law: 'none-such' is unknown",
    ]
    written = FIVE_MISTAKES.splitlines()
    assert len(lines) == 3 * len(beginnings)
    for line, excerpt, carets, beginning in zip(lines[::3], lines[1::3], lines[2::3], beginnings, strict=True):
        assert line.startswith(f"{policy}:{beginning}"), line
        assert "; " in line  # what to write instead
        assert excerpt.endswith(f" | {written[int(beginning.partition(':')[0]) - 1]}")
        assert "^" in carets


def test_run_refuses_a_wrong_policy_with_all_its_mistakes(node: Node, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(FIVE_MISTAKES)
    policy.chmod(0o600)
    done = run(start(tmp_path, "--policy", str(policy)), node.environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.count(f"{policy}:") == 5


@pytest.mark.parametrize(("mode", "writers"), [(0o602, "every user"), (0o620, "its group")])
def test_run_refuses_a_policy_that_others_can_write(mode: int, writers: str, node: Node, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(node.policy(enforce=True))
    policy.chmod(mode)
    message = refusal(run(start(tmp_path, "--policy", str(policy)), node.environment), 2)
    assert message == f"{policy}:1: can be written by {writers}, who could change what the agent does; chmod go-w it"


def test_run_refuses_a_policy_of_another_user(node: Node, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(node.policy(enforce=True))
    policy.chmod(0o600)
    os.chown(policy, NOBODY, NOBODY)
    message = refusal(run(start(tmp_path, "--policy", str(policy)), node.environment), 2)
    assert message == f"{policy}:1: belongs to user 65534, who could change what the agent does; chown it to root"


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_policy_that_is_not_there_is_named(command: str, node: Node, tmp_path: Path) -> None:
    policy = tmp_path / "none.yaml"
    message = refusal(run([*AGENT, command, "--policy", str(policy)], node.environment), 2)
    assert message == f"{policy}:1: cannot be read (No such file or directory); check the path and its permissions"


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_that_makes_no_sense_is_refused(interval: str, node: Node, tmp_path: Path) -> None:
    message = refusal(run(start(tmp_path, f"--interval={interval}"), node.environment), 2)
    assert message == f"--interval {float(interval)}: give seconds between 0.1 and 3600"


def test_without_the_bpf_object_the_refusal_names_how_to_get_it(node: Node, tmp_path: Path) -> None:
    """The built object is hidden in a mount namespace of our own."""
    hide = 'mount -t tmpfs none "$0/bpf/build" && exec "$@"'
    done = run(["unshare", "--mount", "sh", "-c", hide, str(ROOT), *start(tmp_path)], node.environment)
    message = refusal(done, 3)
    assert message.startswith("no BPF object found (looked at ")
    assert message.endswith("run `make bpf`, or reinstall")


def test_a_bpf_object_that_is_none_is_refused(node: Node, tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.bpf.o"
    rubbish.write_bytes(b"rubbish")
    message = refusal(run(start(tmp_path), {**node.environment, "GPUWARDEN_BPF_OBJECT": str(rubbish)}), 4)
    assert message == f"{rubbish} is not a BPF object that libbpf can open: rebuild it with `make bpf`"


def test_a_libcuda_that_is_not_there_is_refused(node: Node, tmp_path: Path) -> None:
    message = refusal(run(start(tmp_path, "--libcuda", str(tmp_path / "none.so")), node.environment), 3)
    assert message == f"{tmp_path / 'none.so'}: no such file; give the path of a libcuda.so.1"


def test_nothing_to_release_is_no_failure(tmp_path: Path) -> None:
    done = run([*AGENT, "release", "--run-dir", str(tmp_path / "none")])
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 processes resumed, 0 entries looked at\n", "")
