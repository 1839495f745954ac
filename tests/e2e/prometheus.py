# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real Prometheus server with its own port and data: what it scraped, asked by PromQL."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tools.harness.wait import until

CONFIG = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: gpuwarden
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Prometheus:
    """One server on its own port with its own data, ended by its pid."""

    def __init__(self, folder: Path, config_text: str) -> None:
        binary = shutil.which("prometheus")
        assert binary, "install Debian's package prometheus"
        config = folder / "prometheus.yml"
        config.write_text(config_text)
        self.port = free_port()
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=5) as answer:
            return dict(json.load(answer)["data"])

    def query(self, expression: str) -> list[dict[str, Any]]:
        try:
            return list(self.ask("query?" + urllib.parse.urlencode({"query": expression}))["result"])
        except (urllib.error.URLError, ConnectionError):  # not ready yet
            return []

    def until(self, expression: str) -> list[dict[str, Any]]:
        """The first result of this PromQL expression that has a series in it."""

        def result() -> list[dict[str, Any]]:
            assert self.process.poll() is None, self._logged()
            return self.query(expression)

        return until(result, lambda: f"a result of {expression}: {self._logged()}", step_seconds=0.1)

    def _logged(self) -> str:
        return Path(self.log.name).read_text()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
