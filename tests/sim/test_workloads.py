# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The two workloads do what they say: the load that was asked for, figures that add up, and a clean end."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tools.harness.node import Node, simulated_node
from tools.harness.wait import until

SHORT = ["--kernels", "3", "--kernel-us", "200"]
ARRIVALS = ["--rate", "200", "--requests", "40", "--start-now", *SHORT]
CALIBRATION_LAUNCHES = 11


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with simulated_node(tmp_path / "gpu", {"gpus": "2"}) as node:
        yield node


def summary(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.removeprefix("ready\n"))


def run_online(node: Node, *arguments: str) -> Any:
    return summary(node.run("online", arguments))


def run_offline(node: Node, *arguments: str) -> Any:
    return summary(node.run("offline", arguments))


def log_of(path: Path) -> list[tuple[float, ...]]:
    return [tuple(float(word) for word in line.split()) for line in path.read_text().splitlines()]


def test_the_same_seed_gives_the_same_arrivals(node: Node, tmp_path: Path) -> None:
    logs = []
    for run, seed in enumerate(("7", "7", "8")):
        run_online(node, *ARRIVALS, "--seed", seed, "--log", str(tmp_path / str(run)))
        logs.append([arrival for arrival, *_ in log_of(tmp_path / str(run))])
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]
    assert logs[0][-1] == pytest.approx(40 / 200, rel=0.6)


def test_the_summary_is_that_of_the_log(node: Node, tmp_path: Path) -> None:
    figures = run_online(node, *ARRIVALS, "--log", str(tmp_path / "log"))
    log = log_of(tmp_path / "log")
    latencies = sorted(latency for _, latency, _ in log)
    assert figures["requests"] == len(log) == 40
    assert figures["latency_seconds"]["max"] == pytest.approx(latencies[-1], abs=1e-8)
    assert figures["latency_seconds"]["p50"] == pytest.approx(latencies[19], abs=1e-8)
    assert figures["latency_seconds"]["mean"] == pytest.approx(sum(latencies) / 40, abs=1e-8)
    busy = sum(service for *_, service in log) / figures["elapsed_seconds"]
    assert figures["busy_ratio"] == pytest.approx(busy, abs=1e-5)


def test_latency_counts_from_the_arrival_that_was_meant(node: Node, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("0.1\n" * 5)
    log = tmp_path / "log"
    run_online(node, "--trace", str(trace), "--start-now", "--kernels", "1", "--kernel-us", "2000", "--log", str(log))
    requests = log_of(log)
    assert [arrival for arrival, *_ in requests] == [0.1] * 5
    for place, (_, latency, service) in enumerate(requests, start=1):
        assert service >= 0.002
        assert latency >= 0.002 * place  # it waited for those before it


def test_a_request_is_as_many_launches_as_was_asked(node: Node) -> None:
    process = node.start("online", [*ARRIVALS, "--copy-bytes", "1000"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (truth,) = [entry for entry in node.truth() if entry["pid"] == process.pid]
    assert json.loads(out.removeprefix("ready\n"))["requests"] == 40
    assert truth["launches"] == 40 * 3 + CALIBRATION_LAUNCHES
    assert truth["tx_bytes"] == 40 * 1000


def test_a_graph_is_one_launch_of_all_kernels(node: Node) -> None:
    process = node.start("online", [*ARRIVALS, "--graph"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (truth,) = [entry for entry in node.truth() if entry["pid"] == process.pid]
    assert truth["launches"] == 40 + CALIBRATION_LAUNCHES
    assert truth["kernels"] == 40 * 3 + CALIBRATION_LAUNCHES


def test_it_waits_for_a_byte_after_it_printed_ready(node: Node) -> None:
    process = node.start("online", ["--rate", "100", "--requests", "5", *SHORT])
    assert process.stdout
    assert process.stdin
    assert process.stdout.readline() == "ready\n"
    before = node.truth()
    process.stdin.write("g")
    process.stdin.flush()
    assert process.wait(timeout=60) == 0
    assert [entry["launches"] for entry in before] == [CALIBRATION_LAUNCHES]
    assert [entry["launches"] for entry in node.truth()] == [CALIBRATION_LAUNCHES + 5 * 3]


def test_it_does_not_start_for_a_parent_that_went_away(node: Node) -> None:
    done = node.run("online", ["--requests", "5"])
    assert done.returncode != 0
    assert "--start-now" in done.stderr


def test_requests_that_could_not_be_served_in_time_are_counted(node: Node) -> None:
    figures = run_online(
        node, "--rate", "100", "--seconds", "0.5", "--drain-seconds", "0", "--start-now", "--kernel-us", "5000"
    )
    assert figures["unserved"] > 0
    assert figures["requests"] + figures["unserved"] == pytest.approx(50, abs=30)


def test_sigterm_ends_online_with_its_summary(node: Node) -> None:
    process = node.start("online", ["--rate", "200", "--seconds", "600", "--start-now", *SHORT])
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["program"] == "online"


@pytest.fixture
def served(node: Node) -> Iterator[http.client.HTTPConnection]:
    process = node.start("online", ["--rate", "0", "--seconds", "600", "--port", "0", "--start-now", *SHORT])
    assert process.stdout
    found = re.fullmatch(r"listening (127\.0\.0\.1):(\d+)\n", process.stdout.readline())
    assert found
    assert process.stdout.readline() == "ready\n"
    connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=60)
    yield connection
    connection.close()


def get(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, str]:
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_http_does_one_request_and_counts_it(served: http.client.HTTPConnection) -> None:
    assert get(served, "/healthz") == (200, "ok\n")
    for _ in range(3):  # on one connection
        status, body = get(served, "/infer")
        assert status == 200
        assert json.loads(body)["latency_seconds"] >= 3 * 200e-6
    status, text = get(served, "/metrics")
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "online_request_duration_seconds"]
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert family.type == "histogram"
    assert samples["online_request_duration_seconds_count", None] == 3
    assert samples["online_request_duration_seconds_bucket", "+Inf"] == 3
    assert samples["online_request_duration_seconds_bucket", "0.0005"] == 0
    assert samples["online_request_duration_seconds_sum", None] >= 3 * 3 * 200e-6


def test_http_counts_from_when_a_request_was_due(served: http.client.HTTPConnection) -> None:
    for due_ns, least, most in ((time.monotonic_ns() - 10**9, 1.0, 60.0), (time.monotonic_ns() + 10**15, 0.0, 60.0)):
        served.request("GET", "/infer", headers={"X-Due-Ns": str(due_ns)})
        latency = json.loads(served.getresponse().read())["latency_seconds"]
        assert least < latency < most


def test_http_refuses_what_it_does_not_know(served: http.client.HTTPConnection) -> None:
    assert get(served, "/nothing")[0] == 404
    assert get(served, "/inference")[0] == 404
    assert get(served, "/infer", "POST")[0] == 405


def test_offline_figures_are_those_of_the_truth(node: Node) -> None:
    process = node.start("offline", ["--steps", "4", "--kernels", "5", "--kernel-us", "300", "--copy-bytes", "1MiB"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    figures = json.loads(out.removeprefix("ready\n"))
    (truth,) = [entry for entry in node.truth() if entry["pid"] == process.pid]
    assert (figures["steps"], figures["kernels"]) == (4, 20)
    assert figures["gpu_seconds_requested"] == pytest.approx(20 * 300e-6)
    assert figures["kernels_per_second"] == pytest.approx(20 / figures["elapsed_seconds"], rel=1e-4)
    assert truth["launches"] == 20 + CALIBRATION_LAUNCHES
    assert truth["rx_bytes"] == figures["copied_bytes"] == 4 << 20


def test_the_log_of_offline_has_a_line_per_step(node: Node, tmp_path: Path) -> None:
    figures = run_offline(node, "--steps", "3", "--kernels", "5", "--kernel-us", "300", "--log", str(tmp_path / "log"))
    times, kernels = zip(*log_of(tmp_path / "log"), strict=True)
    assert kernels == (5, 10, 15)
    assert times[0] >= figures["started_monotonic_ns"] + 5 * 300_000
    assert times[1] - times[0] >= 5 * 300_000
    assert times[2] - times[1] >= 5 * 300_000


def test_a_summary_states_how_fast_the_loop_is_taken_to_be(node: Node) -> None:
    assert run_online(node, *ARRIVALS, "--iterations-per-us", "77")["iterations_per_us"] == 77
    assert run_offline(node, "--steps", "1", "--iterations-per-us", "78")["iterations_per_us"] == 78


def test_the_constants_are_those_of_the_model(node: Node) -> None:
    figures: dict[str, float] = {}

    def are_those_of_the_model() -> bool:
        figures.update(summary(node.run("constants", [])))
        return (
            figures["queue_depth"] == 1022
            and figures["smallest_kernel_ns"] == pytest.approx(1000, rel=0.01)
            and figures["spin_100000_ns"] == pytest.approx(100_000, rel=0.01)
            and figures["ragged_ns"] == pytest.approx(75_000, rel=0.01)
            and 0 < figures["to_device_bytes_per_second"] <= 55e9
            and 3000 <= figures["launch_ns"] < figures["launch_and_wait_ns"]
        )

    until(are_those_of_the_model, lambda: f"a run that nothing disturbs; the last one was {figures}")


def test_a_launch_takes_as_much_of_the_thread_as_is_configured(tmp_path: Path) -> None:
    with simulated_node(tmp_path / "slow", {"launch_cost": "20us"}) as slow:
        assert summary(slow.run("constants", ["--rounds", "1"]))["launch_ns"] >= 20_000


def test_jitter_changes_lengths_and_repeats_with_the_seed(node: Node) -> None:
    steady = ["--steps", "2", "--kernels", "50", "--kernel-us", "50"]
    once, again, other = (
        run_offline(node, *steady, "--jitter", "0.5", "--seed", seed)["gpu_seconds_requested"] for seed in "112"
    )
    assert once == again != other
    assert once == pytest.approx(100 * 50e-6, rel=0.5)


def test_functions_differ_in_length_and_repeat_with_the_seed(node: Node) -> None:
    steady = ["--steps", "2", "--kernels", "50", "--kernel-us", "50", "--functions", "6"]
    once, again, other = (run_offline(node, *steady, "--seed", seed)["gpu_seconds_requested"] for seed in "112")
    assert once == again != other
    assert 100 * 50e-6 / 3 <= once <= 100 * 50e-6 * 3


def test_online_too_launches_several_functions(node: Node) -> None:
    process = node.start("online", [*ARRIVALS, "--functions", "4", "--jitter", "0.2"])
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (truth,) = [entry for entry in node.truth() if entry["pid"] == process.pid]
    assert truth["launches"] == 40 * 3 + CALIBRATION_LAUNCHES


def test_a_launch_of_a_graph_is_all_its_kernels(node: Node) -> None:
    arguments = ["--steps", "4", "--kernels", "2", "--graph", "7", "--kernel-us", "100", "--iterations-per-us", "100"]
    process = node.start("offline", arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    figures = json.loads(out.removeprefix("ready\n"))
    (truth,) = [entry for entry in node.truth() if entry["pid"] == process.pid]
    assert (truth["launches"], truth["kernels"]) == (4 * 2, 4 * 2 * 7)
    assert figures["kernels"] == 4 * 2 * 7
    assert figures["gpu_seconds_requested"] == pytest.approx(4 * 2 * 7 * 100e-6)


@pytest.mark.parametrize("way", [[], ["--drift-jumps"]])
def test_drift_makes_kernels_longer_with_time(node: Node, way: list[str]) -> None:
    arguments = ["--seconds", "1", "--kernels", "1", "--kernel-us", "1000", "--drift", "3", "--drift-seconds", "0.5"]
    figures = run_offline(node, *arguments, *way)
    mean_us = figures["gpu_seconds_requested"] / figures["kernels"] * 1e6
    assert 1050 < mean_us < 2950  # neither its first length all the time nor its last


def test_a_host_pause_is_not_gpu_work(node: Node) -> None:
    figures = run_offline(node, "--steps", "10", "--kernels", "1", "--kernel-us", "10", "--host-us", "20000")
    assert figures["elapsed_seconds"] >= 0.2
    assert figures["gpu_seconds_requested"] == pytest.approx(100e-6)


def test_a_bounded_depth_holds_the_launches_back(node: Node) -> None:
    shallow = ["--steps", "1", "--kernels", "30", "--kernel-us", "500", "--depth", "2"]
    assert run_offline(node, *shallow)["kernels"] == 30
    (truth,) = node.truth()
    assert truth["queued_max_ns"] < 30 * 500_000  # the last of 30 would have waited for 29


def test_never_sync_waits_once_at_the_end(node: Node) -> None:
    figures = run_offline(node, "--steps", "5", "--kernels", "20", "--kernel-us", "200", "--never-sync")
    assert figures["kernels"] == 100
    assert figures["elapsed_seconds"] >= 100 * 200e-6


def test_steps_run_on_every_device(node: Node) -> None:
    run_offline(node, "--devices", "0,1", "--steps", "2", "--kernels", "3", "--kernel-us", "100")
    assert {(entry["device"], entry["launches"]) for entry in node.truth()} == {
        (0, 6 + CALIBRATION_LAUNCHES),
        (1, 6 + CALIBRATION_LAUNCHES),
    }


def test_memory_is_held_from_the_start(node: Node) -> None:
    before = node.status()[0]
    process = node.start("offline", ["--seconds", "0", "--memory", "2GiB", "--kernel-us", "100", "--verbose"])
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    assert "kernels" in process.stdout.readline()
    (truth,) = node.truth()
    assert truth["memory_bytes"] >= 2 << 30
    assert before["device"] == 0


def test_sigterm_ends_offline_with_its_summary(node: Node) -> None:
    process = node.start("offline", ["--seconds", "0", "--kernels", "1000000", "--kernel-us", "100"])
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["kernels"] < 1_000_000  # it does not launch the rest of its step first


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        ("online", ["--rate", "fast"], "--rate"),
        ("online", ["--kernels", "0"], "--kernels"),
        ("online", ["--trace", "/nonexistent"], "/nonexistent"),
        ("online", ["surplus"], "surplus"),
        ("offline", ["--memory", "10GB"], "--memory"),
        ("offline", ["--devices", "0,x"], "--devices"),
        ("offline", ["--jitter", "2"], "--jitter"),
        ("offline", ["--functions", "65"], "--functions"),
        ("offline", ["--drift", "0"], "--drift"),
        ("online", ["--drift-seconds", "0"], "--drift-seconds"),
    ],
)
def test_a_wrong_option_is_refused_by_name(node: Node, program: str, arguments: list[str], expected: str) -> None:
    done = node.run(program, arguments)
    assert done.returncode == 2
    assert expected in done.stderr


def test_memory_that_does_not_fit_ends_with_cudas_name_for_it(node: Node) -> None:
    done = node.run("offline", ["--memory", "1000GiB"])
    assert done.returncode == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in done.stderr


def test_a_step_whose_backward_pass_another_thread_launches_is_as_long(node: Node) -> None:
    arguments = ["--steps", "5", "--kernels", "21", "--kernel-us", "200"]
    figures = [run_offline(node, *arguments, *more) for more in ([], ["--backward"])]
    assert [one["kernels"] for one in figures] == [5 * 21] * 2
    assert figures[0]["gpu_seconds_requested"] == figures[1]["gpu_seconds_requested"]
