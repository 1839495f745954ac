# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a scrape gets, for a snapshot that has one of everything."""

from __future__ import annotations

import os
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from agent.core.model import Container, ContainerKey, ContainerUsage, Snapshot, Totals
from agent.exporters.prometheus import collector
from agent.exporters.prometheus.catalog import CATALOG
from agent.exporters.prometheus.families import container_labels
from tests.support.serving import TcpServer
from tests.support.snapshots import GPU_0, container, rich_snapshot, usage
from tools.manual import metrics_reference

ROOT = Path(__file__).parents[5]
GOLDEN = ROOT / "tests/fixtures/metrics.prom"

OF_THE_PORT = {
    "gpuwarden_web_config_reload_success",
    "gpuwarden_web_config_reload_timestamp_seconds",
    "gpuwarden_web_refused_total",
}
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(snapshot: Snapshot | None) -> Series:
    families = text_string_to_metric_families(collector.render(snapshot))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


def values(snapshot: Snapshot, name: str, **labels: str) -> list[float]:
    return [
        value for (found, at), value in series(snapshot).items() if found == name and labels.items() <= dict(at).items()
    ]


def test_a_scrape_equals_the_golden_file() -> None:
    """GOLDEN=write pytest … rewrites it."""
    text = (
        "\n".join(line for line in collector.render(rich_snapshot()).splitlines() if "build_info{" not in line) + "\n"
    )
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_every_metric_is_in_the_catalogue_and_the_rich_snapshot_has_each() -> None:
    names = {name for name, _ in series(rich_snapshot())}
    assert names | OF_THE_PORT == {metric.name for metric in CATALOG}
    assert not names & OF_THE_PORT, "these are there where there is a web configuration"


def test_the_committed_reference_is_the_generated_one() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics_reference.reference()


def test_before_the_first_snapshot_there_is_only_the_build() -> None:
    assert {name for name, _ in series(None)} == {"gpuwarden_build_info"}


def test_what_is_unknown_is_no_series() -> None:
    snapshot = rich_snapshot()
    assert values(snapshot, "gpuwarden_container_sm_ratio", container="host") == []
    assert values(snapshot, "gpuwarden_container_launches_total", container="host") == []
    assert values(snapshot, "gpuwarden_device_sm_ratio", gpu="2") == []
    assert values(snapshot, "gpuwarden_device_lost", gpu="2") == [1]
    assert values(snapshot, "gpuwarden_unattributed_pcie_transmit_bytes_total", gpu="0") == [0]


def test_a_counter_stays_while_its_rate_is_unknown_for_a_tick() -> None:
    quiet = replace(usage(GPU_0, None, None, rate=None), totals=Totals(1.0, 7, 8, 9))
    used = ContainerUsage(container("c1", "chat"), (quiet,), ())
    snapshot = replace(rich_snapshot(), containers=(used,), ended=())
    assert values(snapshot, "gpuwarden_container_launches_total") == [7]
    assert values(snapshot, "gpuwarden_container_sm_ratio") == []


def test_containers_with_the_same_labels_are_distinguished_by_their_id() -> None:
    found = [dict(at) for name, at in series(rich_snapshot()) if name == "gpuwarden_container_memory_bytes"]
    assert sorted(at["id"] for at in found if at["container"] == "twin") == ["c30000000000", "d40000000000"]
    assert {at["id"] for at in found if at["container"] != "twin"} == {""}


def test_even_containers_without_an_id_never_share_a_series() -> None:
    same = [Container(ContainerKey(f"unit:{n}"), "x" * 500, "systemd") for n in range(3)]
    labels = container_labels(same)
    assert len(set(labels.values())) == 3
    assert max(len(value) for values in labels.values() for value in values) <= 200


def test_a_library_seen_through_two_containers_is_one_series_without_a_pid() -> None:
    snapshot = rich_snapshot()
    assert values(
        snapshot, "gpuwarden_probe_symbols", library="/usr/lib/libcuda.so.1", role="launch", state="attached"
    ) == [83]
    assert "/proc/" not in collector.render(snapshot)


def test_series_are_bounded_by_containers_and_devices_and_do_not_pile_up() -> None:
    base = rich_snapshot()

    def churned(generation: int) -> Snapshot:
        used = tuple(
            ContainerUsage(container(f"{generation}-{n}", f"job-{generation}-{n}"), (usage(GPU_0, 0.01, 1),), ())
            for n in range(50)
        )
        return replace(base, containers=used, enforcement={}, ended=())

    newest: Snapshot = base
    made = collector.registry(lambda: newest)
    counts = []
    for generation in range(5):
        newest = churned(generation)
        counts.append(sum(len(family.samples) for family in made.collect()))
    assert len(set(counts)) == 1
    names = Counter(name for name, _ in series(newest))
    assert names["gpuwarden_container_sm_ratio"] == 50
    assert max(names.values()) == 100  # two kinds of memory, two ages


def test_a_container_that_ended_has_its_counters_and_no_gauges() -> None:
    found = {
        name: value for (name, at), value in series(rich_snapshot()).items() if dict(at).get("container") == "job-17"
    }
    assert found == {
        "gpuwarden_container_sm_seconds_total": 0.25,
        "gpuwarden_container_launches_total": 730,
        "gpuwarden_container_pcie_transmit_bytes_total": 4096,
        "gpuwarden_container_pcie_receive_bytes_total": 8192,
    }


def test_each_scraped_snapshot_is_reported_to_the_keeper_of_ended_containers() -> None:
    reported: list[Snapshot] = []
    with TcpServer({"/metrics": collector.application(rich_snapshot, reported.append)}) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5).read()
    assert [snapshot.ended for snapshot in reported] == [rich_snapshot().ended]


def test_what_a_container_in_no_row_has_lost_is_shown_by_its_key() -> None:
    snapshot = replace(rich_snapshot(), container_losses={ContainerKey("docker:aa"): {"launch_function": 7}})
    assert values(snapshot, "gpuwarden_container_losses_total", container="docker:aa", reason="launch_function") == [7]


def test_a_name_that_is_no_utf8_does_not_void_the_scrape() -> None:
    used = ContainerUsage(container("c1", 'bad\udcff"name\\\n'), (usage(GPU_0, 0.5, 1),), ())
    snapshot = replace(rich_snapshot(), containers=(used,), enforcement={})
    assert values(snapshot, "gpuwarden_container_sm_ratio") == [0.5]
    collector.render(snapshot).encode()


def test_metrics_are_served_on_loopback() -> None:
    with (
        TcpServer({"/metrics": collector.application(rich_snapshot)}) as server,
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as answer,
    ):
        assert b"gpuwarden_container_sm_ratio" in answer.read()


def test_a_name_cannot_steer_the_terminal_in_which_a_scrape_is_read() -> None:
    text = collector.render(rich_snapshot())
    assert all(line.isprintable() for line in text.splitlines())
    assert r"\\x1b[31mevil" in text
