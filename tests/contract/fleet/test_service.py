# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The whole service over HTTP, beside an API server and a Prometheus; each of them away, slow or lying."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from bench.fleet.api_server import GPU, ApiServer, Cluster, RefusedError
from bench.fleet.prometheus import Prometheus, figures
from bench.fleet.prometheus import row as series
from fleet.explain import ask, lines
from fleet.extender import server as http_server
from fleet.model import FleetError
from fleet.planner import Inputs
from fleet.service import Configuration, Service
from fleet.solver import Source
from fleet.sources.kubernetes import Access, KubernetesApi
from fleet.sources.prometheus import Settings
from fleet.weights.table import Table
from tools.harness import wait

T = TypeVar("T")
NODES = ["node-0", "node-1"]
ASKS = {"gpuwarden.io/memory": "8Gi", "gpuwarden.io/kind": "etl", "gpuwarden.io/kernel": "1ms"}
INTERVAL_S = 0.5


@dataclass
class World:
    """What is served, and the service."""

    api: ApiServer
    prometheus: Prometheus
    service: Service
    stop: threading.Event

    def post(self, path: str, document: Any) -> Any:
        request = urllib.request.Request(self.service.url + path, json.dumps(document).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def pod(self, name: str, annotations: dict[str, str] | None = None) -> dict[str, Any]:
        """One more, that the service knows of and has planned for."""
        pod = self.api.cluster.add(name, ASKS if annotations is None else annotations)
        uid = pod["metadata"]["uid"]
        until(lambda: self.service.state.pod(uid) is not None)
        return pod

    def filter(self, pod: dict[str, Any]) -> Any:
        return self.post("/filter", {"Pod": pod, "NodeNames": NODES})

    def place(self, pod: dict[str, Any]) -> str:
        """As kube-scheduler does. The error."""
        return self.bind(pod, self.offered(pod)[0])

    def offered(self, pod: dict[str, Any]) -> Any:
        """The nodes, once there are some: a plan may just be too old."""
        return until(lambda: self.filter(pod)["NodeNames"])

    def bind(self, pod: dict[str, Any], node: str) -> str:
        metadata = pod["metadata"]
        body = {"PodName": metadata["name"], "PodNamespace": "batch", "PodUID": metadata["uid"], "Node": node}
        return str(self.post("/bind", body)["Error"])

    def annotations(self, name: str) -> Any:
        return self.api.cluster.get(f"batch/{name}")["metadata"]["annotations"]

    def is_up_to_date(self, name: str) -> bool:
        """Whether the service knows the pod as it is."""
        now = self.api.cluster.get(f"batch/{name}")["metadata"]
        known = self.service.state.pod(now["uid"])
        return known is not None and known["metadata"]["resourceVersion"] == now["resourceVersion"]

    def waits_because(self, reason: str) -> bool:
        return reason in (self.service.state.view().refusal or "")


def until(holds: Callable[[], T | None]) -> T:
    return wait.until(holds, "it to hold")


def start(api: ApiServer, prometheus: Prometheus) -> tuple[Service, threading.Event]:
    stop = threading.Event()
    source = Source(prometheus.url, Settings(), "physical", Table({}), learn_over_s=2.0)
    inputs = Inputs(source, INTERVAL_S)
    loopback = ("127.0.0.1", 0)
    return Service(Configuration(KubernetesApi(Access(api.url), 1.0), inputs, loopback, loopback), stop), stop


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One for all tests: each leaves it working, and its GPUs free."""
    api, prometheus = ApiServer(Cluster()), Prometheus(figures(2, 2))
    threads = [threading.Thread(target=one.serve_forever, args=(0.02,)) for one in (api, prometheus)]
    for thread in threads:
        thread.start()
    service, stop = start(api, prometheus)
    found = World(api, prometheus, service, stop)
    yield found
    service = found.service
    service.close()
    api.stopped = True
    for server in (api, prometheus):
        server.shutdown()
        server.server_close()
    for thread in threads:
        thread.join()


@pytest.fixture(autouse=True)
def _well(world: World) -> Iterator[None]:
    until(lambda: world.service.state.view().refusal is None)
    yield
    world.api.fault, world.prometheus.fault = lambda *_: None, lambda: None
    world.prometheus.set(figures(2, 2))
    for key in list(world.api.cluster.pods):
        world.api.cluster.delete(key)
    until(lambda: not world.service.state.view().reservations.gpus)


def test_a_pod_is_filtered_scored_bound_and_explained(world: World) -> None:
    pod = world.pod("etl-1")
    nodes = world.offered(pod)
    scores = world.post("/prioritize", {"Pod": pod, "NodeNames": nodes})
    assert {one["Host"] for one in scores} == set(nodes)
    assert world.bind(pod, nodes[0]) == ""
    written = world.annotations("etl-1")
    assert written[GPU].startswith(f"GPU-{nodes[0].removeprefix('node-')}-")
    assert 0 < float(written["gpuwarden.io/expected-throughput"]) <= 1
    assert world.api.cluster.get("batch/etl-1")["spec"]["nodeName"] == nodes[0]
    text = "\n".join(lines(ask(world.service.url, "batch/etl-1")))
    assert f"batch/etl-1 is bound: {written[GPU]} on {nodes[0]}" in text


def test_a_placed_pod_gets_an_event_that_says_what_is_expected(world: World) -> None:
    before = len(world.api.cluster.events)
    assert world.place(world.pod("etl-1")) == ""
    until(lambda: len(world.api.cluster.events) > before)
    event = world.api.cluster.events[-1]
    assert (event["reason"], event["involvedObject"]["name"]) == ("GPUAssigned", "etl-1")
    assert "expected throughput" in event["message"]


def test_each_gpu_is_given_once_and_the_next_pod_is_refused_with_a_reason(world: World) -> None:
    pods = [world.pod(f"p{at}") for at in range(5)]
    assert [world.place(pod) for pod in pods[:4]] == [""] * 4
    assert world.api.cluster.doubles == []
    until(lambda: set(world.filter(pods[4])["FailedNodes"]) == set(NODES))
    assert "batch/p4 waits" in lines(ask(world.service.url, "batch/p4"))[0]


def test_a_pod_that_waits_is_told_why_gpus_have_no_room(world: World) -> None:
    rows = figures(2, 2)
    rows["gpuwarden_enforcing"] = []
    world.prometheus.set(rows)
    world.pod("etl-1")
    until(lambda: "GPUs without room: 4 × not enforcing" in lines(ask(world.service.url, "batch/etl-1")))


def test_many_binds_at_once_give_no_gpu_twice(world: World) -> None:
    pods = [world.pod(f"p{at}") for at in range(8)]
    world.offered(pods[0])
    threads = [threading.Thread(target=world.bind, args=(pod, NODES[at % 2])) for at, pod in enumerate(pods)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.api.cluster.doubles == []
    assert 1 <= len(world.api.cluster.by_gpu) <= 4


def test_a_pod_that_was_refused_is_woken_when_the_plan_has_a_gpu_for_it(world: World) -> None:
    pods = [world.pod(f"p{at}") for at in range(4)]
    assert [world.place(pod) for pod in pods] == [""] * 4
    late = world.pod("late")
    until(lambda: not world.filter(late)["NodeNames"])
    world.api.cluster.delete("batch/p0")
    until(lambda: "gpuwarden.io/plan" in world.annotations("late"))


def test_a_pair_whose_service_missed_its_promise_is_worth_half(world: World) -> None:
    pods = [world.pod(f"p{at}") for at in range(4)]
    assert [world.place(pod) for pod in pods] == [""] * 4
    beside = next(one for one in (f"p{at}" for at in range(4)) if world.annotations(one)[GPU] == "GPU-0-0")
    device = {"instance": "node-0", "UUID": "GPU-0-0"}
    offline = {"instance": "node-0", "container": "main", "pod": beside, "namespace": "batch"}
    rows = figures(2, 2)
    (online,) = (one for one in rows["gpuwarden_container_role_info"] if one["metric"]["container"] == "c-GPU-0-0")
    rows["max_over_time(gpuwarden_container_role_info"] = [online, series(1, **offline, role="offline", rule="batch")]
    labels = {name: text for name, text in online["metric"].items() if name not in ("role", "rule")}
    launches = [series(100, **{**one, **device}) for one in (labels, offline)]
    rows["increase(gpuwarden_container_launches_total"] = launches
    rows["increase(gpuwarden_container_slo_slow_requests_total"] = [series(50, **labels)]
    rows["increase(gpuwarden_container_slo_requests_total"] = [series(100, **labels)]
    rows["max_over_time(gpuwarden_container_slo_quantile_ratio"] = [series(0.99, **labels)]
    world.prometheus.set(rows)
    until(lambda: "gpuwarden_fleet_penalised_pairs 1.0" in page(world, "/metrics"))


def test_a_pod_that_the_scheduler_tried_to_place_while_no_service_ran_is_woken_by_the_next_one(world: World) -> None:
    world.service.close()
    world.api.cluster.add("left", ASKS)
    tried = [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}]
    world.api.cluster.set_phase("batch/left", "Pending", conditions=tried)
    world.service, world.stop = start(world.api, world.prometheus)
    until(lambda: "gpuwarden.io/plan" in world.annotations("left"))


def test_while_prometheus_is_away_nothing_new_is_placed_and_the_reason_is_given(world: World) -> None:
    pod = world.pod("etl-1")

    def away() -> None:
        raise OSError

    world.prometheus.fault = away
    until(lambda: world.waits_because("Prometheus"))
    refused = world.filter(pod)
    assert refused["NodeNames"] == []
    assert "Prometheus" in refused["FailedNodes"]["node-0"]
    assert "nothing new is placed" in world.bind(pod, "node-0")
    world.prometheus.fault = lambda: None
    assert world.place(pod) == ""


def test_stale_figures_make_no_slots(world: World) -> None:
    rows = figures(2, 2)
    for row in rows["time() - gpuwarden_snapshot"]:
        row["value"][1] = "1000"
    world.prometheus.set(rows)
    pod = world.pod("etl-1")
    until(lambda: world.filter(pod)["FailedNodes"].get("node-0", "") == "no healthy GPU with 8 GiB")
    assert 'unknown_slots{reason="stale figures"} 4.0' in page(world, "/metrics")


def test_two_gpus_with_one_uuid_are_no_slots(world: World) -> None:
    rows = figures(2, 1)
    for row in rows["gpuwarden_device_info"]:
        row["metric"]["UUID"] = "GPU-same"
    world.prometheus.set(rows)
    until(lambda: 'unknown_slots{reason="two GPUs have its UUID"} 2.0' in page(world, "/metrics"))
    assert world.filter(world.pod("etl-1"))["NodeNames"] == []


def test_while_the_api_server_is_away_nothing_new_is_placed(world: World) -> None:
    pod = world.pod("etl-1")
    world.offered(pod)

    def away(_method: str, _path: str) -> None:
        raise RefusedError(503, "away")

    world.api.fault = away
    assert "503" in world.bind(pod, "node-0")
    assert GPU not in world.annotations("etl-1")
    world.api.cluster.forget()  # its watches end
    until(lambda: world.waits_because("the API server"))
    assert world.filter(pod)["NodeNames"] == []


def test_a_slow_api_server_makes_a_binding_fail_and_not_hang(world: World) -> None:
    pod = world.pod("etl-1")
    world.offered(pod)
    world.api.fault = lambda method, _path: time.sleep(1.5) if method == "PATCH" else None
    assert "does not answer" in world.bind(pod, "node-0")


def test_a_watch_that_is_gone_is_followed_by_a_list(world: World) -> None:
    world.api.cluster.forget()
    assert world.place(world.pod("etl-1")) == ""


def test_a_pod_that_another_one_bound_loses_the_annotation(world: World) -> None:
    pod = world.pod("etl-1")
    world.offered(pod)
    world.api.cluster.bind("batch/etl-1", pod["metadata"]["uid"], "elsewhere")
    until(lambda: world.is_up_to_date("etl-1"))  # a write to the version before would be refused for that
    assert "already assigned to node elsewhere" in world.bind(pod, world.offered(pod)[0])
    assert GPU not in world.annotations("etl-1")


def test_a_service_that_starts_again_knows_who_has_what(world: World) -> None:
    assert world.place(world.pod("etl-1")) == ""
    mine = world.annotations("etl-1")[GPU]
    other = "GPU-1-0" if mine != "GPU-1-0" else "GPU-1-1"
    left = world.api.cluster.add("left", {**ASKS, GPU: other, "gpuwarden.io/node": "node-1"})
    world.service.close()
    world.service, world.stop = start(world.api, world.prometheus)
    until(lambda: world.service.state.view().refusal is None)
    assert world.service.state.view().reservations.gpus == {mine, other}
    assert world.offered(left) == ["node-1"]
    assert world.bind(left, "node-1") == ""
    assert world.annotations("left")[GPU] == other


def test_pages_say_how_it_is(world: World) -> None:
    assert json.loads(page(world, "/healthz")) == {"status": "serving", "refusal": None}
    until(lambda: json.loads(page(world, "/v1/plan"))["schema"] == "gpuwarden.fleet-plan/1")
    text = page(world, "/metrics")
    for name in ("slots", "jobs", "plan_value", "plan_timestamp_seconds", "extender_duration_seconds_count"):
        assert f"gpuwarden_fleet_{name}" in text


def test_where_others_read_pages_nothing_can_be_bound(world: World) -> None:
    url = world.service.pages_url
    assert url is not None
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        assert b"gpuwarden_fleet_jobs" in answer.read()
    for verb in ("filter", "prioritize", "bind"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/{verb}", b"{}", timeout=60)
        assert caught.value.code == 404
        caught.value.close()


def test_an_unknown_pod_is_an_error_that_says_what_to_check(world: World) -> None:
    with pytest.raises(FleetError, match="is the namespace right"):
        ask(world.service.url, "batch/none")


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/filter", b"{", 400, "no JSON"),
        ("/filter", b"[" * 100_000, 400, "no JSON"),
        ("/filter", b"{}", 400, "needs the object Pod"),
        ("/bind", b"{}", 400, "PodNamespace"),
        ("/preempt", b"{}", 404, "no verb"),
    ],
)
def test_a_wrong_request_gets_its_reason(world: World, path: str, body: bytes, status: int, reason: str) -> None:
    request = urllib.request.Request(world.service.url + path, body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == status
    assert reason in json.loads(caught.value.read())["Error"]


def test_too_large_a_body_is_refused_before_it_is_read(world: World) -> None:
    connection = http.client.HTTPConnection(world.service.url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/filter")
    connection.putheader("Content-Length", str(http_server.LONGEST_BODY + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_client_that_does_not_send_its_body_is_answered_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.3)
    host, port = world.service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(b"POST /filter HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in slow.recv(1000)


def test_a_termination_signal_ends_the_command_and_its_processes(world: World) -> None:
    where = ["--prometheus", world.prometheus.url, "--kubernetes", world.api.url, "--listen", "127.0.0.1:0"]
    command = [sys.executable, "-m", "fleet.command", "serve", *where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        assert "serves on http://127.0.0.1:" in serving.stderr.readline()
        assert ": 0 of 0 waiting pods" in serving.stderr.readline()  # so the process that plans runs
        serving.terminate()
        serving.stderr.read()  # ends when no process has it open any more
        assert serving.wait(timeout=60) == 0


def page(world: World, path: str) -> str:
    with urllib.request.urlopen(world.service.url + path, timeout=60) as answer:
        return str(answer.read().decode())
