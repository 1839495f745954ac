# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The processes of the extender's bench: the service, which can be killed, and the servers that it asks."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

_START_S: Final = 20.0


class Processes:
    """The three servers."""

    def __init__(self, nodes: int, gpus: int) -> None:
        ports = _free_ports(3)
        self.api, self.prometheus, self.service = (f"127.0.0.1:{port}" for port in ports)
        module = [sys.executable, "-m"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  close() closes it
        self._others = [
            subprocess.Popen([*module, "bench.fleet.api_server", str(ports[0])]),
            subprocess.Popen([*module, "bench.fleet.prometheus", str(ports[1]), str(nodes), str(gpus)]),
        ]
        self._serving: subprocess.Popen[bytes] | None = None
        try:
            for address in (self.api, self.prometheus):
                _wait_for(address)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """The service."""
        where = ["--prometheus", f"http://{self.prometheus}", "--kubernetes", f"http://{self.api}"]
        command = [sys.executable, "-m", "fleet.command", "serve", *where, "--listen", self.service]
        self._serving = subprocess.Popen(command, stderr=self._log)

    def kill(self) -> None:
        """The service, with SIGKILL."""
        if self._serving is not None:
            self._serving.kill()
            self._serving.wait()

    def rss_mib(self) -> float:
        """Largest of the present service."""
        assert self._serving is not None
        status = Path(f"/proc/{self._serving.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def log_tail(self) -> str:
        """What the services said last."""
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")

    def close(self) -> None:
        """All three."""
        self.kill()
        for process in self._others:
            process.kill()
            process.wait()
        self._log.close()


def _free_ports(count: int) -> list[int]:
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in bound]
    for one in bound:
        one.close()
    return ports


def _wait_for(address: str) -> None:
    host, port = address.split(":")
    end_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
        else:
            return
