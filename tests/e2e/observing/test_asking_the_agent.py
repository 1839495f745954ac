# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The running agent's faces beside its figures: `gpuwarden reload`, /livez and /readyz, which users may connect."""

from __future__ import annotations

import json
import os
import signal
import ssl
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agent.exporters.api.client import readers
from tests.e2e.node import Agent, Node
from tests.support.certificates import Authority
from tools.harness.wait import until


def answer_of(agent: Agent, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{agent.port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_reload_prints_its_outcome(node: Node, warden: Agent) -> None:
    assert warden.policy is not None
    right = node.policy(enforce=False)
    warden.policy.write_text(right)
    done = node.run("reload", "--socket", str(warden.socket))
    assert (done.returncode, done.stderr) == (0, "")
    line = f"the policy of {warden.policy} is in force: 1 online rule, 1 offline rule, deciding and logging only"
    assert done.stdout.startswith(line)
    read_at = warden.snapshot().policy_wall_ns or 0
    warden.policy.write_text(right.replace("law: headroom", "law: hedroom"))
    try:
        done = node.run("reload", "--socket", str(warden.socket))
        assert done.returncode == 2
        complaint, excerpt, carets, kept = done.stdout.splitlines()
        assert complaint.startswith(f"{warden.policy}:10:10: error: offline[0].law: 'hedroom' is unknown")
        assert excerpt.endswith(" |     law: hedroom")
        assert carets.strip(" |^") == ""
        assert kept == "the policy was not reloaded: the old one stays in force"
        assert (warden.snapshot().policy_wall_ns or 0) >= read_at
    finally:
        warden.policy.write_text(right)
    assert node.run("reload", "--socket", str(warden.socket)).returncode == 0
    until(lambda: (warden.snapshot().policy_wall_ns or 0) > read_at, "a snapshot of the new policy")


def test_reload_is_refused_without_an_agent_and_on_the_socket_for_readers(
    node: Node, warden: Agent, tmp_path: Path
) -> None:
    refused = node.run("reload", "--socket", str(tmp_path / "none.sock"))
    assert refused.returncode == 3
    assert "start one" in refused.stderr
    reader = node.run("reload", "--socket", str(warden.run_dir / "read.sock"))
    assert reader.returncode == 3
    assert "orders are taken on agent.sock, as root" in reader.stderr


def test_curl_speaks_with_the_agent(warden: Agent) -> None:
    def curl(socket: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
        command = ["curl", "--silent", "--write-out", "%{http_code}", "--unix-socket", str(socket), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        document, _, status = done.stdout.rpartition("\n")
        return status, json.loads(document)

    assert warden.policy is not None
    reading = warden.run_dir / "read.sock"
    status, snapshot = curl(reading, "http://localhost/v1/snapshot")
    assert (status, snapshot["interval_ns"]) == ("200", warden.snapshot().interval_ns)
    status, known = curl(reading, "http://localhost/v1/explain")
    assert (status, known["has_policy"]) == ("200", True)
    status, outcome = curl(warden.socket, "--request", "POST", "http://localhost/v1/reload")
    assert (status, outcome["exit_code"]) == ("200", 0)
    right = warden.policy.read_text()
    warden.policy.write_text("version: none")
    try:
        status, outcome = curl(warden.socket, "--request", "POST", "http://localhost/v1/reload")
        assert (status, outcome["exit_code"]) == ("422", 2)
        assert "the policy was not reloaded" in outcome["text"]
    finally:
        warden.policy.write_text(right)
        curl(warden.socket, "--request", "POST", "http://localhost/v1/reload")


def test_each_socket_is_whose_it_is_to_be(warden: Agent) -> None:
    assert stat.S_IMODE(warden.socket.stat().st_mode) == 0o600
    reading = (warden.run_dir / "read.sock").stat()
    assert stat.S_IMODE(reading.st_mode) == (0o600 if readers() is None else 0o660)
    assert reading.st_gid == (os.getegid() if readers() is None else readers())


def test_it_lives_and_is_ready(warden: Agent) -> None:
    assert answer_of(warden, "/livez") == (200, "ok\n")
    assert answer_of(warden, "/readyz") == (200, "ok\n")


def test_run_refuses_a_wrong_web_configuration_with_every_mistake(node: Node, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("basic_auth_users: {alice: sesame}\ntls_server_config: {cert_file: none.pem}\n")
    wrong.chmod(0o600)
    where = ("--run-dir", str(tmp_path / "run"), "--usage", "off", "--listen", "127.0.0.1:0")
    done = node.run("run", *where, "--web-config", str(wrong))
    assert done.returncode == 2
    assert f"{wrong}:1: basic_auth_users.alice has no bcrypt hash" in done.stderr
    assert f"{wrong}:2: tls_server_config.cert_file names {tmp_path / 'none.pem'}, which cannot be read" in done.stderr


@pytest.fixture(scope="module")
def secured(node: Node, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A web configuration, and the authority of its certificate."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder / "authority")
    authority.issue("agent")
    path = folder / "web.yml"
    path.write_text("tls_server_config: {cert_file: authority/agent.pem, key_file: authority/agent.key}\n")
    path.chmod(0o600)
    return path, authority.cert


def test_it_serves_tls_where_it_is_configured_to(node: Node, secured: tuple[Path, Path]) -> None:
    path, authority = secured
    with node.agent(None, "--web-config", str(path), run_dir="secured") as agent:
        assert f"metrics on https://127.0.0.1:{agent.port}/metrics" in agent.log.read_text()
        context = ssl.create_default_context(cafile=str(authority))
        with urllib.request.urlopen(f"https://127.0.0.1:{agent.port}/livez", timeout=30, context=context) as answer:
            assert answer.read() == b"ok\n"
        agent.process.send_signal(signal.SIGTERM)
        agent.process.wait(60)
        assert not list(agent.run_dir.glob("*.sock"))


def test_a_port_on_all_addresses_is_warned_of(node: Node, tmp_path: Path) -> None:
    where = ("--run-dir", str(tmp_path / "run"), "--usage", "off", "--listen", "0.0.0.0:0")
    done = node.run("run", *where, "--libcuda", str(tmp_path / "none.so"))
    assert done.returncode == 3
    assert done.stderr.count("is served to every client that can reach it") == 1
    assert "restrict it with --web-config" in done.stderr
