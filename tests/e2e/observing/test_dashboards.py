# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every expression of every panel and rule, asked of a real Prometheus that scrapes a node where everything happens.

An online container whose promise cannot be kept, one whose signal cannot be read, an offline one that is paused and
frozen, an XID, MIG instances, and dcgm-exporter's figures beside ours. The target's own labels are those of a pod, as
the Prometheus operator sets them: with `honor_labels` ours stay what they are.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.core.model import DeviceUuid
from dashboards.generated import FOLDER, PAGES, RULES
from dashboards.placement import PLACEMENT
from tests.e2e.node import TRAINING, Node
from tests.e2e.places import place
from tests.e2e.prometheus import Prometheus
from tools.harness.node import BUILD
from tools.harness.wait import until

SERVING = ("--rate", "50", "--kernels", "4", "--kernel-us", "500", "--seconds", "3600", "--start-now")
LEARNING = (*TRAINING, "--copy-bytes", "2MiB", "--memory", "1GiB")
POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 1ms, window: 5s, also: {{quantile: 0.5, target: 900us}}}}
  - name: mute
    match: {{container: "mute-{token}"}}
    slo:
      {{signal: prometheus, url: "http://127.0.0.1:1/m", metric: seconds, quantile: 0.9, target: 1s, window: 5s}}
offline:
  - name: training
    match: {{container: "training-{token}"}}
    limits: {{memory: 20GiB, floor: 50%, max_pause: 1s}}
    ladder: [gate, pace, freeze]
"""
DCGM = ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE")
SELECTOR = re.compile(r"(?<![\w:])(?:up\b|(?:container:)?gpuwarden_\w+(?::\w+)?)(?:\{[^}]*\})?")
PATIENCE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Watched:
    """The node, and the Prometheus that scrapes it."""

    node: Node
    prometheus: Prometheus


OF_AGENTS = [one.uid for one in PAGES if one is not PLACEMENT]
"""`make kubernetes-fleet` asks for the other one's series"""
NOT_ON_THIS_NODE = (
    "gpuwarden_fleet_",
    "gpuwarden_container_deadline_",  # no rule of it is periodic
    "gpuwarden_container_http_answers_total",  # no service with the signal http
    "gpuwarden_container_unprobed",  # unknown until NVML has reported a process of its own for some seconds
)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Everything runs, and was scraped a few times."""
    folder = tmp_path_factory.mktemp("dashboards")
    with ExitStack() as stack:
        node, _ = stack.enter_context(place(folder / "n"))
        agent = stack.enter_context(node.agent(POLICY.format(token=node.token)))
        stack.enter_context(node.container("chat", "online", SERVING))
        containers = str(BUILD / "lib")  # by name: other programs' libraries may be probed first
        until(
            lambda: any(containers in probed.library and probed.attached for probed in agent.snapshot().probes),
            "probes on the containers' libcuda",  # from then on allocations count
        )
        stack.enter_context(node.container("mute", "online", SERVING))
        stack.enter_context(node.container("training", "offline", LEARNING))
        until(lambda: agent.pauses(node.name("training")), "the first pause")
        subprocess.run([BUILD / "bin" / "gpusim", "fault", "xid", "0", "63"], env=node.environment, check=True)
        uuids = [reading.device.uuid for reading in agent.snapshot().devices]
        exporter = stack.enter_context(dcgm_exporter(uuids))
        prometheus = Prometheus(folder, config(folder, agent.port, exporter))
        stack.callback(prometheus.close)
        prometheus.until("gpuwarden_build_info")
        yield Watched(node, prometheus)


@contextmanager
def dcgm_exporter(uuids: list[DeviceUuid]) -> Iterator[int]:
    """Its labels, and a figure for each device; the port."""
    lines = [f'{name}{{gpu="{n}",UUID="{uuid}"}} 0.5' for name in DCGM for n, uuid in enumerate(uuids)]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server's name
            self.send_response(200)
            self.end_headers()
            self.wfile.write(("\n".join([*lines, ""])).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def config(folder: Path, agent_port: int, exporter_port: int) -> str:
    """Each rule is evaluated as often as is scraped: two minutes are long for a test."""
    for name in RULES:
        rules = yaml.safe_load((FOLDER / f"rules/{name}.yaml").read_text())
        groups = [{key: value for key, value in group.items() if key != "interval"} for group in rules["groups"]]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"groups": groups}))
    pod = {"namespace": "monitoring", "pod": "gpuwarden-x7k2p", "container": "agent"}
    document = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / f"{name}.yaml") for name in RULES],
        "scrape_configs": [
            {
                "job_name": "monitoring/gpuwarden",
                "honor_labels": True,
                "static_configs": [{"targets": [f"127.0.0.1:{agent_port}"], "labels": pod}],
            },
            {"job_name": "dcgm-exporter", "static_configs": [{"targets": [f"127.0.0.1:{exporter_port}"]}]},
        ],
    }
    return yaml.safe_dump(document)


def page(uid: str) -> dict[str, Any]:
    """As it is committed."""
    found: dict[str, Any] = json.loads((FOLDER / f"grafana/{uid}.json").read_text())
    return found


def chosen(watched: Watched, uid: str) -> dict[str, str]:
    """Each variable's value as Grafana fills it in: the first one, or all."""
    values: dict[str, str] = {"__rate_interval": "10s", "__range": "1m"}
    for variable in page(uid)["templating"]["list"]:
        if variable["type"] == "query":
            parts = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert parts is not None
            selector, label = filled(parts[1], values), parts[2]
            rows = watched.prometheus.until(f"group by ({label}) ({selector})")
            several = variable.get("multi", False)
            values[variable["name"]] = variable["allValue"] if several else rows[0]["metric"][label]
    return values


def filled(expr: str, values: dict[str, str]) -> str:
    """With the variables' values in their places."""
    return re.sub(r"\$([a-z_]\w*)", lambda name: values[name[1]], expr)


def empty(watched: Watched, expressions: list[str]) -> list[str]:
    """Those that return nothing until patience runs out."""
    left = list(expressions)

    def none_is_left() -> bool:
        left[:] = [expr for expr in left if not watched.prometheus.query(expr)]
        return not left

    with suppress(TimeoutError):
        until(none_is_left, "a result of each expression", PATIENCE_SECONDS, step_seconds=1)
    return left


@pytest.mark.parametrize("uid", OF_AGENTS)
def test_every_panel_shows_something(watched: Watched, uid: str) -> None:
    values = chosen(watched, uid)
    targets = [target for panel in page(uid)["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 20
    assert empty(watched, [filled(target["expr"], values) for target in targets]) == []


@pytest.mark.parametrize("uid", OF_AGENTS)
def test_every_label_of_a_legend_is_there(watched: Watched, uid: str) -> None:
    values = chosen(watched, uid)
    for panel in page(uid)["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            wanted = shown - {"part"}  # only a MIG instance is one
            series = watched.prometheus.until(filled(target["expr"], values))
            assert all(wanted <= one["metric"].keys() for one in series), (panel["title"], series)
            names = [tuple(one["metric"].get(label) for label in sorted(shown)) for one in series]
            if panel["type"] == "timeseries":
                assert len(set(names)) == len(names), (panel["title"], names)


def test_whatever_a_rule_reads_is_there(watched: Watched) -> None:
    texts = [(FOLDER / f"rules/{name}.yaml").read_text() for name in RULES]
    every = [rule["expr"] for text in texts for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    selectors = {
        selector for expr in every for selector in SELECTOR.findall(expr) if not selector.startswith(NOT_ON_THIS_NODE)
    }
    assert empty(watched, [f"last_over_time({selector}[5m])" for selector in sorted(selectors)]) == []


def test_every_recording_rule_records_and_no_rule_fails(watched: Watched) -> None:
    names = [rule["record"] for group in _rules(watched) for rule in _of(group, "recording")]
    assert len(names) == 7
    assert empty(watched, names) == []
    every = [rule for group in _rules(watched) for rule in group["rules"]]
    assert [(rule["name"], rule["lastError"]) for rule in every if rule["health"] != "ok"] == []


def test_a_target_that_is_missed_all_the_time_burns_and_one_without_a_reading_does_not(watched: Watched) -> None:
    (chat,) = watched.prometheus.until("container:gpuwarden_slo_burn:rate5m > 90")  # each request is too slow
    assert chat["metric"]["container"] == watched.node.name("chat")
    # Pending is enough: it fires after two minutes, and rules/tests has cases for that.
    (fast,) = watched.prometheus.until('max without (alertstate) (ALERTS{alertname="GPUWardenSLOBurnsFast"})')
    assert fast["metric"]["container"] == watched.node.name("chat")
    watched.prometheus.until('ALERTS{alertname="GPUWardenXID", alertstate="firing", xid="63"}')


def test_a_containers_labels_are_not_those_of_the_agents_pod(watched: Watched) -> None:
    (chat,) = watched.prometheus.until(f'gpuwarden_container_memory_bytes{{container="{watched.node.name("chat")}"}}')
    assert {"pod", "namespace", "exported_pod", "exported_container"} & chat["metric"].keys() == set()
    device, *_ = watched.prometheus.until("gpuwarden_device_info")
    assert device["metric"]["pod"] == "gpuwarden-x7k2p"


def _rules(watched: Watched) -> list[dict[str, Any]]:
    return list(watched.prometheus.ask("rules")["groups"])


def _of(group: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [{**rule, "record": rule["name"]} for rule in group["rules"] if rule["type"] == kind]
