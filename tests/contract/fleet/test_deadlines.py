# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The fleet's reads end in time, from servers on the loopback device that are slow on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fleet.deadlines import fetch
from fleet.model import FleetError
from fleet.sources.prometheus import prometheus

TIMEOUT_SECONDS = 0.5
BETWEEN_SECONDS = 0.1
FOREVER = 10**6


class Slow(BaseHTTPRequestHandler):
    """One byte after another."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/whole")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(5 if self.path == "/whole" else FOREVER))
        self.end_headers()
        with suppress(OSError):
            for byte in b"whole" if self.path == "/whole" else b" " * FOREVER:
                self.wfile.write(bytes([byte]))
                time.sleep(0.001 if self.path == "/whole" else BETWEEN_SECONDS)

    def log_message(self, *_: object) -> None:
        """No line for each request."""


@contextmanager
def slow() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["/whole", "/moved"])
def test_an_answer_that_comes_in_time_is_read_whole_also_after_a_redirect(path: str) -> None:
    with slow() as url:
        assert fetch(url + path, 30, 100) == b"whole"
        assert fetch(url + path, 30, 3) == b"who"


def test_a_server_that_goes_on_sending_bytes_is_given_up_at_the_deadline() -> None:
    with slow() as url, pytest.raises(TimeoutError):
        fetch(url, TIMEOUT_SECONDS, FOREVER)


def test_a_prometheus_that_goes_on_sending_bytes_does_not_answer() -> None:
    with slow() as url, pytest.raises(FleetError, match=r"does not answer: .*is the URL right\?"):
        prometheus(url, TIMEOUT_SECONDS)("up")
