# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real Prometheus scrapes /metrics on loopback, and its queries give the figures of the snapshot.

It takes five seconds until its first scrape: so the two that are needed are started together, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import bcrypt
import pytest

from agent.core.model import Snapshot
from agent.exporters.prometheus import collector
from agent.exporters.web.auth import Guard
from agent.exporters.web.config import WebConfigFile
from tests.e2e.prometheus import CONFIG, Prometheus
from tests.support.certificates import Authority
from tests.support.serving import TcpServer
from tests.support.snapshots import rich_snapshot

SECURED = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: right
    scheme: https
    tls_config: &papers {{ca_file: {ca}, cert_file: {cert}, key_file: {key}}}
    basic_auth: {{username: scraper, password: sesame}}
    static_configs: &agent [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: wrong-password
    scheme: https
    tls_config: *papers
    basic_auth: {{username: scraper, password: wrong}}
    static_configs: *agent
  - job_name: no-certificate
    scheme: https
    tls_config: {{ca_file: {ca}}}
    basic_auth: {{username: scraper, password: sesame}}
    static_configs: *agent
"""
WEB_CONFIG = """\
tls_server_config:
  cert_file: authority/agent.pem
  key_file: authority/agent.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: authority/ca.pem
  client_allowed_sans: [scraper.example]
basic_auth_users:
  scraper: {hashed}
"""


class Served:
    """The exporter with a snapshot that the test changes."""

    def __init__(self) -> None:
        self.snapshot: Snapshot = rich_snapshot()
        self.server = TcpServer({"/metrics": collector.application(lambda: self.snapshot)})


@pytest.fixture(scope="module")
def exporter() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


@pytest.fixture(scope="module", autouse=True)
def scraper(exporter: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("scraper"), CONFIG.format(port=exporter.server.port))
    yield server
    server.close()


@pytest.fixture(scope="module", autouse=True)
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Of an exporter that asks for a certificate and a password."""
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder / "authority")
    authority.issue("agent")
    scraper = authority.issue("scraper", "DNS:scraper.example")
    path = folder / "web.yml"
    path.write_text(WEB_CONFIG.format(hashed=bcrypt.hashpw(b"sesame", bcrypt.gensalt(4)).decode()))
    path.chmod(0o600)
    file = WebConfigFile(path)
    guard = Guard(file.terms)
    metrics = collector.application(rich_snapshot, also=lambda: (*file.rows(), *guard.rows()))
    with TcpServer({"/metrics": metrics}, guard=guard) as server:
        papers = {"ca": authority.cert, "cert": scraper.cert, "key": scraper.key}
        asking = Prometheus(folder, SECURED.format(port=server.port, **papers))
        yield asking
        asking.close()


@pytest.fixture
def served(exporter: Served) -> Served:
    """With everything that there was at first."""
    exporter.snapshot = rich_snapshot()
    return exporter


def test_a_real_prometheus_scrapes_the_figures_of_the_snapshot(served: Served, scraper: Prometheus) -> None:
    (up,) = scraper.until('up{job="gpuwarden"} == 1')
    assert up["value"][1] == "1"
    (trainer,) = scraper.until('gpuwarden_container_sm_ratio{container="trainer"}')
    assert float(trainer["value"][1]) == 0.48
    assert trainer["metric"]["namespace"] == "batch"
    assert trainer["metric"]["pod"] == "train-0"
    assert "pid" not in trainer["metric"]
    (added_up,) = scraper.until(
        'sum(gpuwarden_container_sm_ratio{gpu="0"}) + sum(gpuwarden_unattributed_sm_ratio{gpu="0"})'
    )
    (device,) = scraper.until('gpuwarden_device_sm_ratio{gpu="0"}')
    assert float(added_up["value"][1]) == pytest.approx(float(device["value"][1]))


def test_a_container_that_ends_disappears_from_prometheus(served: Served, scraper: Prometheus) -> None:
    scraper.until('gpuwarden_container_sm_ratio{container="trainer"}')
    left = tuple(used for used in served.snapshot.containers if used.container.name != "trainer")
    served.snapshot = replace(served.snapshot, containers=left)
    scraper.until('absent(gpuwarden_container_sm_ratio{container="trainer"})')
    scraper.until('gpuwarden_container_sm_ratio{container="chat"}')


def test_a_real_prometheus_scrapes_with_a_certificate_and_a_password_and_not_without(secured: Prometheus) -> None:
    secured.until('up{job="right"} == 1')
    secured.until('up{job="wrong-password"} == 0')
    secured.until('up{job="no-certificate"} == 0')
    secured.until('gpuwarden_web_refused_total{job="right", reason="password"} > 1')
    secured.until('gpuwarden_web_refused_total{job="right", reason="certificate"} > 1')
    secured.until('gpuwarden_web_config_reload_success{job="right"} == 1')
    secured.until('up{job="right"} == 1')
