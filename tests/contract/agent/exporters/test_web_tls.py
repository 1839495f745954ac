# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's port with TLS, certificates and passwords: real handshakes, and certificates that openssl made."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest

from agent.config import validation
from agent.exporters.liveness import Health
from agent.exporters.prometheus import collector
from agent.exporters.prometheus.families import Row
from agent.exporters.web import config
from agent.exporters.web.auth import REASONS, Guard
from agent.exporters.web.config import WebConfigFile
from agent.exporters.web.server import MAX_OF_ONE_ADDRESS
from tests.support.certificates import LONG_AGO, Authority, Certificate, openssl
from tests.support.serving import TcpServer
from tests.support.snapshots import rich_snapshot
from tools.harness.wait import until

HASH = bcrypt.hashpw(b"sesame", bcrypt.gensalt(4)).decode()
SUITES = ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256")
OF_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


@dataclass(frozen=True, slots=True)
class Papers:
    """Who there is: the server's authority and another one, and what each gave."""

    folder: Path
    ours: Authority
    theirs: Authority
    server: Certificate
    client: Certificate
    expired: Certificate
    stranger: Certificate


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
    names = "DNS:scraper.example,IP:10.0.0.7,IP:fd00::7,email:ops@example.org,URI:spiffe://example/scraper"
    return Papers(
        folder,
        ours,
        theirs,
        ours.issue("server"),
        ours.issue("client", names),
        ours.issue("expired", names, LONG_AGO),
        theirs.issue("stranger", names),
    )


@dataclass(slots=True)
class Port:
    """What is served under a web configuration, which the test may change."""

    papers: Papers
    server: TcpServer
    guard: Guard
    path: Path
    file: WebConfigFile | None = None

    def open(self, text: str) -> None:
        """Everything is replaced but for the port."""
        self.write(text)
        self.file = WebConfigFile(self.path)
        self.guard.terms = self.file.terms
        self.guard._refused = dict.fromkeys(REASONS, 0)

    def rows(self) -> list[Row]:
        assert self.file is not None
        return [*self.file.rows(), *self.guard.rows()]

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    def client(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.papers.ours.cert))
        if certificate is not None:
            context.load_cert_chain(certificate.cert, certificate.key)
        return context

    def ask(
        self,
        path: str = "/metrics",
        method: str = "GET",
        login: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        context = context or self.client()
        headers = {} if login is None else {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
        with closing(http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=10, context=context)) as asked:
            asked.request(method, path, headers=headers)
            answer = asked.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def turns_away(self, context: ssl.SSLContext, path: str = "/metrics") -> None:
        """A client with this context gets no answer, in whichever way it notices."""
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            self.ask(path, context=context)

    def refused(self, reason: str) -> float:
        return next(count for _, (found,), count in self.guard.rows() if found == reason)

    def has_refused(self, reason: str) -> None:
        """One client. It knows before it is counted."""
        until(lambda: self.refused(reason) == 1, f"a client that is refused for {reason}")

    def subject(self) -> str:
        """Of the certificate that the server shows."""
        with (
            socket.create_connection(("127.0.0.1", self.server.port), timeout=10) as plain,
            self.client().wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            certificate = secured.getpeercert(binary_form=True)
        assert certificate is not None
        return openssl("x509", "-noout", "-subject", text=ssl.DER_cert_to_PEM_cert(certificate)).split()[-1]


Opened = Callable[[str], Port]


@pytest.fixture(scope="module")
def port(papers: Papers) -> Iterator[Port]:
    guard = Guard()
    made: list[Port] = []
    metrics = collector.application(rich_snapshot, also=lambda: made[0].rows())
    probes = Health(rich_snapshot, lambda: None, 1, lambda: rich_snapshot().at_ns).routes()
    with TcpServer({"/metrics": metrics}, probes, guard) as server:
        made.append(Port(papers, server, guard, papers.folder / "web.yml"))
        yield made[0]


@pytest.fixture
def opened(port: Port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    monkeypatch.setattr(validation, "SETTLED_SECONDS", 0.0)
    port.path = tmp_path / "web.yml"

    def open_with(text: str) -> Port:
        port.open(text)
        return port

    return open_with


def tls(certificate: Certificate, **keys: object) -> str:
    every = {"cert_file": str(certificate.cert), "key_file": str(certificate.key), **keys}
    return "tls_server_config:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in every.items())


def s_client(port: Port, *options: str) -> str:
    """What a handshake came to, by another program than ours; nothing where it was refused."""
    where = ("-connect", f"127.0.0.1:{port.server.port}", "-CAfile", str(port.papers.ours.cert))
    done = subprocess.run(
        ["openssl", "s_client", *where, "-brief", *options], input=b"", capture_output=True, timeout=20, check=False
    )
    message = done.stderr.decode()
    return message if done.returncode == 0 else ""


def test_it_is_served_by_tls_and_taken_leave_of_properly(opened: Opened, papers: Papers) -> None:
    port = opened(tls(papers.server))
    status, headers, body = port.ask()
    assert (status, int(headers["content-length"])) == (200, len(body))
    assert b"gpuwarden_web_config_reload_success 1.0" in body
    assert b'gpuwarden_web_refused_total{reason="certificate"} 0.0' in body
    assert port.ask(method="HEAD")[0::2] == (200, b"")
    with (
        socket.create_connection(("127.0.0.1", port.server.port), timeout=10) as plain,
        port.client().wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as secured,
    ):
        secured.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: secured.recv(4096), b""))  # raises where the end is not announced
    assert answer.endswith(b"ok\n")


def test_curl_is_content(opened: Opened, papers: Papers) -> None:
    port = opened(tls(papers.server) + f"basic_auth_users: {{alice: '{HASH}'}}\n")
    curl = shutil.which("curl")
    assert curl, "install Debian's package curl"
    command = [
        curl,
        "-sS",
        "--fail",
        "--cacert",
        str(papers.ours.cert),
        "-u",
        "alice:sesame",
        f"https://127.0.0.1:{port.server.port}/metrics",
    ]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gpuwarden_build_info" in done.stdout


def test_clear_text_is_refused_and_counted(opened: Opened, papers: Papers) -> None:
    port = opened(tls(papers.server))
    with closing(http.client.HTTPConnection("127.0.0.1", port.server.port, timeout=10)) as plain:
        plain.request("GET", "/metrics")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
    port.has_refused("handshake")


def test_certificate_and_key_may_be_in_the_file_itself(opened: Opened, papers: Papers) -> None:
    inline = {"cert": papers.server.cert.read_text(), "key": papers.server.key.read_text()}
    text = "tls_server_config:\n" + "".join(
        f"  {key}: |\n" + "".join(f"    {line}\n" for line in value.splitlines()) for key, value in inline.items()
    )
    text += f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca: {json.dumps(papers.ours.cert.read_text())}\n"
    port = opened(text)
    assert port.ask(context=port.client(papers.client))[0] == 200


def test_paths_are_relative_to_the_files_folder(
    opened: Opened, papers: Papers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(papers.server.cert, tmp_path / "c.pem")
    shutil.copy(papers.server.key, tmp_path / "k.pem")
    monkeypatch.chdir("/")
    assert opened("tls_server_config: {cert_file: c.pem, key_file: k.pem}\n").ask()[0] == 200


@pytest.mark.parametrize("holder", ["none", "stranger", "expired", "client"])
def test_only_a_valid_certificate_of_the_authority_is_admitted(opened: Opened, papers: Papers, holder: str) -> None:
    port = opened(
        tls(papers.server, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(papers.ours.cert))
    )
    context = port.client(None if holder == "none" else getattr(papers, holder))
    if holder == "client":
        assert port.ask(context=context)[0] == 200
        assert port.refused("certificate") == 0
        return
    port.turns_away(context, "/livez")
    port.has_refused("certificate")


@pytest.mark.parametrize(
    ("holder", "admitted"), [("none", True), ("stranger", False), ("expired", False), ("client", True)]
)
def test_a_certificate_that_is_looked_at_if_given_must_be_valid(
    opened: Opened, papers: Papers, holder: str, admitted: bool
) -> None:
    port = opened(tls(papers.server, client_auth_type="VerifyClientCertIfGiven", client_ca_file=str(papers.ours.cert)))
    context = port.client(None if holder == "none" else getattr(papers, holder))
    if admitted:
        assert port.ask(context=context)[0] == 200
        return
    port.turns_away(context)
    port.has_refused("certificate")


def test_no_certificate_is_asked_for_unless_that_is_written(opened: Opened, papers: Papers) -> None:
    port = opened(tls(papers.server, client_auth_type="NoClientCert"))
    assert port.ask(context=port.client(papers.stranger))[0] == 200
    assert not port.guard.terms().is_restricted


@pytest.mark.parametrize(
    ("allowed", "admitted"),
    [
        ("scraper.example", True),
        ("10.0.0.7", True),
        ("FD00:0::7", True),
        ("ops@example.org", True),
        ("spiffe://example/scraper", True),
        ("other.example", False),
        ("example", False),
        ("*.example", False),
        ("client", False),  # the common name is no alternative one
    ],
)
def test_only_a_client_with_one_of_the_names_is_admitted(
    opened: Opened, papers: Papers, allowed: str, admitted: bool
) -> None:
    asked = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(papers.ours.cert)}
    port = opened(tls(papers.server, **asked, client_allowed_sans=["another.example", allowed]))
    context = port.client(papers.client)
    if admitted:
        assert port.ask(context=context)[0] == 200
        return
    port.turns_away(context)
    port.has_refused("certificate")


def test_versions_are_kept_to(opened: Opened, papers: Papers) -> None:
    port = opened(tls(papers.server))
    assert "TLSv1.3" in s_client(port)
    assert "TLSv1.2" in s_client(port, "-tls1_2")
    assert not s_client(port, "-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0")
    port.write(tls(papers.server, min_version="TLS13"))
    assert not s_client(port, "-tls1_2")
    port.write(tls(papers.server, max_version="TLS12"))
    assert not s_client(port, "-tls1_3")
    assert "TLSv1.2" in s_client(port)


def test_suites_are_kept_to_and_whose_order_counts_is_as_written(opened: Opened, papers: Papers) -> None:
    port = opened(tls(papers.server, cipher_suites=[SUITES[1], *OF_13]))
    chosen = ("-tls1_2", "-cipher", "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES128-GCM-SHA256")
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in s_client(port, *chosen)
    assert not s_client(port, "-tls1_2", "-cipher", "ECDHE-ECDSA-AES256-GCM-SHA384")
    assert "TLSv1.3" in s_client(port)
    both = [SUITES[1], SUITES[0]]
    port.write(tls(papers.server, cipher_suites=both))
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in s_client(port, *chosen)
    port.write(tls(papers.server, cipher_suites=both, prefer_server_cipher_suites=False))
    assert "ECDHE-ECDSA-AES256-GCM-SHA384" in s_client(port, *chosen)


@pytest.mark.parametrize("version", ["-tls1_2", "-tls1_3"])
@pytest.mark.parametrize(
    ("curve", "its_name", "another", "temporary"),
    [("CurveP384", "P-384", "X25519", "ECDH, secp384r1"), ("X25519", "X25519", "P-256", "X25519")],
)
def test_the_curve_is_kept_to(
    opened: Opened, papers: Papers, curve: str, its_name: str, another: str, temporary: str, version: str
) -> None:
    port = opened(tls(papers.server, curve_preferences=[curve]))
    offered = dict.fromkeys((another, its_name, "P-256"))  # the certificate's own is named there too in TLS 1.2
    assert f"Server Temp Key: {temporary}" in s_client(port, version, "-curves", ":".join(offered))
    if version == "-tls1_3":
        assert not s_client(port, version, "-curves", another)


@pytest.mark.parametrize(
    ("login", "status", "reason"),
    [
        (None, 401, "anonymous"),
        ("alice:wrong", 401, "password"),
        ("bob:sesame", 401, "password"),
        ("alice:sesame", 200, None),
    ],
)
def test_a_client_without_a_right_password_sees_nothing_but_liveness(
    opened: Opened, papers: Papers, login: str | None, status: int, reason: str | None
) -> None:
    port = opened(tls(papers.server) + f"basic_auth_users: {{alice: '{HASH}'}}\n")
    found, headers, body = port.ask(login=login)
    assert found == status
    assert (b"gpuwarden_" in body) is (status == 200)
    for path in ("/none", "/metrics"):
        for method in ("HEAD", "POST"):
            assert (port.ask(path, method, login=login)[0] == 401) is (status == 401)
    if reason is not None:
        assert headers["www-authenticate"].startswith("Basic ")
        assert port.refused(reason) == 5
    for path in ("/livez", "/readyz"):
        assert port.ask(path)[0::2] == (200, b"ok\n")
        assert port.ask(path, "HEAD")[0::2] == (200, b"")
        assert port.ask(path, "POST")[0] == 405


def test_headers_are_of_each_answer_that_has_not_its_own(opened: Opened, papers: Papers) -> None:
    headers = "http_server_config: {headers: {Strict-Transport-Security: max-age=9, X-Frame-Options: deny}}\n"
    port = opened(tls(papers.server) + headers + f"basic_auth_users: {{alice: '{HASH}'}}\n")
    for path, login in (("/metrics", "alice:sesame"), ("/metrics", None), ("/none", "alice:sesame"), ("/livez", None)):
        found = port.ask(path, login=login)[1]
        assert (found["strict-transport-security"], found["x-frame-options"]) == ("max-age=9", "deny")


def test_a_client_that_does_not_shake_hands_holds_up_no_other_and_is_cut_off(
    opened: Opened, papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = opened(tls(papers.server))
    clients = port.server.server._clients
    monkeypatch.setattr(port.server.listener, "deadline_seconds", 5.0)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port.server.port), timeout=60))
            for _ in range(MAX_OF_ONE_ADDRESS - 1)  # all may stay
        ]
        silent[0].sendall(b"\x16\x03\x01")  # the beginning of a handshake
        until(lambda: len(clients) == len(silent), "all of them to be accepted")
        monkeypatch.setattr(port.server.listener, "deadline_seconds", 60.0)  # of the next client
        assert port.ask()[0] == 200
        assert len(clients) >= len(silent), "it was answered when they were cut off"
        for one in silent:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""


def test_a_changed_certificate_is_shown_without_a_restart_and_a_broken_one_never(
    opened: Opened, papers: Papers, tmp_path: Path
) -> None:
    cert, key = tmp_path / "now.pem", tmp_path / "now.key"

    def put(certificate: Certificate) -> None:
        for source, target in ((certificate.cert, cert), (certificate.key, key)):
            (new := target.with_suffix(".new")).write_bytes(source.read_bytes())
            new.chmod(0o600)
            new.rename(target)

    put(papers.server)
    port = opened(f"tls_server_config: {{cert_file: {cert.name}, key_file: {key.name}}}\n")
    assert port.subject() == "server"
    put(papers.ours.issue("renewed"))
    assert port.subject() == "renewed"
    for broken in (papers.client.cert.read_bytes(), b"", b"-----BEGIN CERTIFICATE-----\n!\n"):
        cert.write_bytes(broken)
        assert port.subject() == "renewed"
        assert b"gpuwarden_web_config_reload_success 0.0" in port.ask()[2]
    cert.unlink()
    assert port.subject() == "renewed"
    put(papers.server)
    assert port.subject() == "server"
    assert b"gpuwarden_web_config_reload_success 1.0" in port.ask()[2]


def test_an_admitted_client_is_checked_again_when_the_authority_changes(
    opened: Opened, papers: Papers, tmp_path: Path
) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_bytes(papers.ours.cert.read_bytes())
    authority.chmod(0o600)
    port = opened(tls(papers.server, client_auth_type="RequireAndVerifyClientCert", client_ca_file=str(authority)))
    context = port.client(papers.client)
    assert port.ask(context=context)[0] == 200
    authority.write_bytes(papers.theirs.cert.read_bytes())
    port.turns_away(context)
    assert port.ask(context=port.client(papers.stranger))[0] == 200


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("mismatch", 3, "is not the key of the certificate"),
        ("locked", 3, "is locked with a passphrase"),
        ("rubbish", 2, "has no certificate that can be read"),
        ("no key", 3, "cannot be used"),
        ("authority", 5, "has no certificate that can be read"),
    ],
)
def test_files_that_are_not_what_they_are_to_be_are_named(
    papers: Papers, tmp_path: Path, name: str, line: int, expected: str
) -> None:
    cert, key, authority = papers.server.cert, papers.server.key, papers.ours.cert
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("rubbish\n")
    rubbish.chmod(0o600)
    if name == "mismatch":
        key = papers.client.key
    elif name == "locked":
        locked = tmp_path / "locked.key"
        openssl("ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked)
        key = locked
    elif name == "rubbish":
        cert = rubbish
    elif name == "no key":
        key = rubbish
    else:
        authority = rubbish
    path = tmp_path / "web.yml"
    path.write_text(
        f"tls_server_config:\n  cert_file: {cert}\n  key_file: {key}\n"
        f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {authority}\n"
    )
    path.chmod(0o600)
    (problem,) = config.check_file(path).problems
    assert (problem.place.line, expected in problem.text) == (line, True), problem
