# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The yardstick for attribution: known recordings in, known errors out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    Device,
    DeviceReading,
    DeviceUuid,
    Provenance,
    Snapshot,
    Totals,
    Unattributed,
    Usage,
)
from bench.attribution.errors import errors, leak, misses, rows_of, strangers, unattributed
from bench.attribution.nvml import Listing, parse
from bench.attribution.recording import Life, Recording, TruthSample
from bench.attribution.scenarios import Scenario, Tenant
from bench.attribution.shares import (
    Owner,
    by_job,
    by_tenant,
    equal_split_seconds,
    gpuwarden_seconds,
    interpolate,
    nvml_seconds,
    true_seconds,
)

S = 1_000_000_000
GPU = DeviceUuid("GPU-0")
WALL_NS = 1000 * S  # CLOCK_REALTIME − CLOCK_MONOTONIC


def usage(container: str, ratio: float, total: float) -> ContainerUsage:
    mine = Usage(GPU, ratio, Provenance.ESTIMATED, None, None, None, None, Totals(total))
    return ContainerUsage(Container(ContainerKey(container), container, "docker", id=container), (mine,), ())


def snapshot(at_s: int, activity: float, *containers: ContainerUsage) -> Snapshot:
    device = Device(0, GPU, "GPU", "", 132, None)
    rest = activity - sum(row.usage[0].sm_ratio or 0.0 for row in containers)
    return Snapshot(
        at_ns=at_s * S,
        wall_ns=at_s * S + WALL_NS,
        interval_ns=S,
        devices=(DeviceReading(device, sm_activity_ratio=activity),),
        containers=containers,
        unattributed=(Unattributed(GPU, rest, None, None, None),),
    )


def sample(at_s: float, a: float, b: float) -> TruthSample:
    return TruthSample(round(at_s * S), {(1, GPU): round(a * S), (2, GPU): round(b * S)})


def listing(at_s: float, tgids: tuple[int, ...], *samples: tuple[int, float]) -> Listing:
    stamps = tuple((round((at_s * S + WALL_NS) / 1000), tgid, ratio) for tgid, ratio in samples)
    return Listing(round(at_s * S), GPU, tgids, stamps)


@pytest.fixture
def recording() -> Recording:
    """Two seconds in which "a" really had half of the device and "b" a quarter; "b" came and went in the first."""
    return Recording(
        lives=(Life("web", "a", 1, 0), Life("job", "b", 2, 10 * S, round(10.5 * S))),
        snapshots=(
            snapshot(10, 0.5, usage("a", 0.5, 7.0)),
            snapshot(11, 1.0, usage("a", 0.4, 7.4), usage("b", 0.5, 0.5)),
            snapshot(12, 0.5, usage("a", 0.4, 7.8)),
        ),
        truth=(sample(9.9, 1.0, 0.0), sample(10.1, 1.1, 0.0), sample(11, 1.55, 0.5), sample(12.5, 2.3, 0.5)),
        listings=(listing(11.1, (1, 2), (1, 0.9), (2, 0.4)), listing(12.1, (1,), (1, 0.8))),
        begin_ns=10 * S,
        end_ns=12 * S,
    )


def test_the_truth_is_interpolated_to_the_window(recording: Recording) -> None:
    assert true_seconds(recording) == pytest.approx({Owner("a", GPU): 1.0, Owner("b", GPU): 0.5})


def test_between_samples_is_a_straight_line_and_beyond_them_the_nearest() -> None:
    series = [(10, 1.0), (20, 3.0)]
    assert [interpolate(series, at) for at in (5, 10, 15, 20, 99)] == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_gpuwarden_is_the_growth_of_totals_also_of_containers_that_are_gone(recording: Recording) -> None:
    assert gpuwarden_seconds(recording) == pytest.approx({Owner("a", GPU): 0.8, Owner("b", GPU): 0.5})


def test_nvml_is_the_utilisation_of_samples_within_the_window(recording: Recording) -> None:
    assert nvml_seconds(recording) == pytest.approx({Owner("a", GPU): 0.9, Owner("b", GPU): 0.4})


def test_equal_split_divides_each_second_by_the_tenants_present(recording: Recording) -> None:
    assert equal_split_seconds(recording) == pytest.approx({Owner("a", GPU): 1.0, Owner("b", GPU): 0.5})


def test_shares_are_of_the_window_and_by_tenant(recording: Recording) -> None:
    assert by_tenant(recording, true_seconds(recording)) == pytest.approx(
        {Owner("web", GPU): 0.5, Owner("job", GPU): 0.25}
    )


def test_a_job_is_measured_over_its_own_time_but_at_least_a_tick(recording: Recording) -> None:
    assert by_job(recording, true_seconds(recording)) == pytest.approx({Owner("b", GPU): 0.5})


def test_errors_count_missed_tenants_and_wrongly_charged_ones_but_no_strangers() -> None:
    truth = {Owner("a", GPU): 0.5, Owner("b", GPU): 0.2}
    estimates = {Owner("a", GPU): 0.4, Owner("c", GPU): 0.3, Owner("host", GPU): 0.1}
    found = errors(truth, estimates, {"a", "b", "c"})
    assert (found.mean_abs, found.worst) == pytest.approx((0.2, 0.3))
    assert not found.fits


def test_a_run_in_which_no_tenant_used_a_gpu_is_no_perfect_run() -> None:
    with pytest.raises(ValueError, match="no container"):
        errors({}, {}, {"a"})


def test_jobs_have_rows_by_kind_and_each_for_itself(recording: Recording) -> None:
    scenario = Scenario("made-up", 7, 1, False, (Tenant("web", "online", ()), Tenant("job", "offline", (), jobs=True)))
    rows = rows_of(scenario, recording)
    assert [(row["scenario"], row["method"]) for row in rows] == [
        (name, method) for name in ("made-up", "made-up-each") for method in ("gpuwarden", "nvml", "equal_split")
    ]
    assert (rows[0]["mean_abs_error"], rows[0]["worst_container_error"]) == (0.05, 0.1)
    assert (rows[0]["seed"], rows[0]["containers"], rows[0]["seconds"]) == (7, 2, 2.0)
    assert (rows[3]["mean_abs_error"], rows[3]["containers"]) == (0.0, 1)


@pytest.mark.parametrize(
    ("method", "mean", "worst", "missed"),
    [
        ("gpuwarden", 0.03, 0.08, False),
        ("gpuwarden", 0.031, 0.04, True),
        ("gpuwarden", 0.01, 0.081, True),
        ("nvml", 0.5, 0.9, False),
    ],
)
def test_only_ours_can_miss_and_either_bound_counts(method: str, mean: float, worst: float, missed: bool) -> None:
    assert misses({"method": method, "mean_abs_error": mean, "worst_container_error": worst}) is missed


def test_unattributed_time_and_sums_that_do_not_add_up_are_seen(recording: Recording) -> None:
    assert unattributed(recording) == pytest.approx((0.1 + 0.1) / 2)
    assert leak(recording) == pytest.approx(0, abs=1e-12)
    last = recording.snapshots[-1]
    wrong = replace(last, unattributed=(replace(last.unattributed[0], sm_ratio=0.3),))
    assert leak(replace(recording, snapshots=(*recording.snapshots[:-1], wrong))) == pytest.approx(0.2)


def test_what_went_to_another_process_on_the_machine_is_seen(recording: Recording) -> None:
    assert strangers(recording) == 0
    last = snapshot(12, 0.5, usage("a", 0.1, 7.8), usage("foreign", 0.4, 0.4))
    assert strangers(replace(recording, snapshots=(*recording.snapshots[:-1], last))) == pytest.approx(0.2)


def test_a_listing_that_was_cut_off_is_left_out() -> None:
    line = '{"at_ns": 5, "device": "GPU-0", "tgids": [1], "samples": [[7, 1, 0.5]]}\n'
    assert parse(line + line[:20]) == [Listing(5, GPU, (1,), ((7, 1, 0.5),))]
