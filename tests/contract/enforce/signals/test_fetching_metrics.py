# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pages of metrics from real servers, which may do as they like: what comes of it is a page or a reason, in time."""

from __future__ import annotations

import itertools
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from agent.core.clock import monotonic_ns
from agent.node.http_client import Failure, FetchError, fetch
from enforce.policy.model import PrometheusSource
from enforce.signals.scraper import Scraper
from tools.harness.wait import until

S = 1_000_000_000
PATIENCE_SECONDS = 30.0
OK = b"HTTP/1.0 200 OK\r\n\r\n"
PAGE = b'm_bucket{le="1"} 1\nm_bucket{le="+Inf"} 2\n'

Serve = Callable[[socket.socket], object]


@contextmanager
def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A server that does this to each connection; its address."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(0.05)
        ending = threading.Event()

        def run() -> None:
            while not ending.is_set():
                with suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(PATIENCE_SECONDS)
                    speaking = tls.wrap_socket(connection, server_side=True) if tls else connection
                    serve(speaking)
                    with suppress(OSError):
                        speaking.shutdown(socket.SHUT_RDWR)
                    speaking.close()

        thread = threading.Thread(target=run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ending.set)
        yield f"{'https' if tls else 'http'}://localhost:{listener.getsockname()[1]}/metrics"


def saying(*parts: bytes) -> Serve:
    """Reads the request and sends these."""

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        for part in parts:
            connection.sendall(part)

    return serve


def dripping(first: bytes, drop: bytes) -> Serve:
    """Sends this, and then a little now and then, for ever."""

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(first)
        with suppress(OSError):
            while True:
                connection.sendall(drop)
                time.sleep(0.01)

    return serve


def endless(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(OK)
    with suppress(OSError):
        for _ in itertools.count():
            connection.sendall(b"#" * 65536)


def failure(url: str, within_ns: int = 20 * S) -> FetchError:
    with pytest.raises(FetchError) as failed:
        fetch(url, monotonic_ns() + within_ns)
    return failed.value


def test_a_page_is_read() -> None:
    with serving(saying(OK, PAGE)) as url:
        assert fetch(url, monotonic_ns() + 20 * S) == PAGE.decode()


def test_the_request_contains_its_host_and_nothing_else_of_ours() -> None:
    seen: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        seen.append(connection.recv(65536))
        connection.sendall(OK + PAGE)

    with serving(serve) as url:
        fetch(f"{url}?name=a", monotonic_ns() + 20 * S)
        assert seen[0].startswith(b"GET /metrics?name=a HTTP/1.1\r\nHost: localhost:")


@pytest.mark.parametrize(
    ("serve", "expected", "message"),
    [
        (saying(b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"), Failure.STATUS, "not followed"),
        (saying(b"HTTP/1.0 500 Oh\r\n\r\n" + PAGE), Failure.STATUS, "status 500"),
        (saying(b"HTTP/1.0 204 None\r\n\r\n"), Failure.STATUS, "status 204"),
        (saying(b"SSH-2.0-OpenSSH_9.2\r\n"), Failure.MALFORMED, "check slo.url"),
        (saying(), Failure.UNREACHABLE, "check slo.url"),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", PAGE), Failure.MALFORMED, "HTTP"),
        (saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), Failure.MALFORMED, "HTTP"),
        (saying(b"HTTP/1.0 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"), Failure.MALFORMED, "HTTP"),
        (endless, Failure.TOO_LARGE, "MiB"),
    ],
)
def test_whatever_a_server_does_there_is_a_reason(serve: Serve, expected: Failure, message: str) -> None:
    with serving(serve) as url:
        failed = failure(url)
        assert failed.failure is expected
        assert message in str(failed)


@pytest.mark.parametrize(
    "serve", [dripping(b"", b"H"), dripping(OK, b"#"), dripping(b"HTTP/1.0 200 OK\r\n", b"X: y\r\n")]
)
def test_a_server_that_takes_its_time_is_left_when_time_is_up(serve: Serve) -> None:
    with serving(serve) as url:
        assert failure(url, S // 5).failure in (Failure.TIMEOUT, Failure.MALFORMED)  # 100 lines of headers: enough


def test_a_silent_server_is_left_when_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert failure(url, S // 10).failure is Failure.TIMEOUT


def test_a_port_without_a_listener_is_unreachable() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert failure(f"http://127.0.0.1:{bound.getsockname()[1]}/").failure is Failure.UNREACHABLE


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """For localhost, self-signed."""
    path = tmp_path / "server.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=localhost"]
    options += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(["openssl", "req", *options], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "cert.pem").read_text())
    return path


def test_https_is_read_with_a_certificate_that_is_trusted_and_refused_with_another(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(saying(OK, PAGE), context) as url:
        assert failure(url).failure is Failure.TLS
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.parent / "cert.pem"))
        assert fetch(url, monotonic_ns() + 20 * S) == PAGE.decode()


def test_a_scraper_tells_a_failure_once_and_counts_each(caplog: pytest.LogCaptureFixture) -> None:
    pages = iter([b"HTTP/1.0 500 Oh\r\n\r\n"] * 3 + [OK + PAGE] * 2 + [OK + b"other 1\n"] * 2)
    with serving(lambda connection: saying(next(pages))(connection)) as url:
        source = PrometheusSource(url, "m")
        scraper = Scraper(url)
        with caplog.at_level("INFO"), closing(scraper):
            for _ in range(7):
                scraper.scrape([source])
        assert scraper.failures == {(source, Failure.STATUS): 3, (source, Failure.ABSENT): 2}
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_a_page_that_breaks_the_reader_does_not_end_the_scraping() -> None:
    answers: Iterator[str] = iter(["broken", PAGE.decode()])

    def read(_url: str, _deadline_ns: int) -> str:
        answer = next(answers, PAGE.decode())
        if answer == "broken":
            raise RuntimeError(answer)
        return answer

    source = PrometheusSource("http://h/m", "m")
    with closing(Scraper(source.url, read, each_ns=S // 100)) as scraper:
        until(lambda: (latest := scraper.latest(source, monotonic_ns())) and latest.series, "a page with the metric")
        assert scraper.failures == {(source, Failure.MALFORMED): 1}


def test_all_that_use_one_address_share_one_question() -> None:
    asked: list[str] = []

    def read(url: str, _deadline_ns: int) -> str:
        asked.append(url)
        return PAGE.decode() + PAGE.decode().replace("m_bucket", "n_bucket")

    sources = [PrometheusSource("http://h/m", name) for name in ("m", "n")]
    scraper = Scraper("http://h/m", read)
    scraper.scrape(sources)
    assert asked == ["http://h/m"]
    assert set(scraper._latest) == set(sources)
