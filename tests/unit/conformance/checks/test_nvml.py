# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The item `nvml`: rows out of NVML's answers, also where it answers little, or otherwise than the simulated GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent.core.model import Device, DeviceReading, DeviceUuid
from conformance import checks
from conformance.checks.nvml import item, pcie, samples
from conformance.checks.nvml import rows as rows_of_costs
from conformance.checks.nvml import rows as rows_of_lists
from conformance.checks.nvml import rows as rows_of_samples
from conformance.checks.nvml.binding import Gpu, Refused, asked
from conformance.checks.nvml.cost import Cost, TimedBinding
from conformance.checks.nvml.lists import Listed, bytes_of, lists_of
from conformance.checks.nvml.pcie import FROM_DEVICE, TO_DEVICE, CopyRates, FieldReadings, _watched
from conformance.checks.nvml.samples import DEVICE, NEW, OLD, Sample, Samples
from conformance.checks.nvml.watching import Observation
from conformance.report.model import Row, Verdict

MIB = 1 << 20
READY_US = 1_000_000_000
PID, OTHER = 41, 42


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 6: "Not Found", 0: "Success"}[value])
        self.value = value


API = SimpleNamespace(NVMLError=NVMLError, NVML_ERROR_NOT_FOUND=6, NVML_SUCCESS=0)


def a_gpu(**calls: Any) -> Gpu:
    return Gpu(SimpleNamespace(**{**vars(API), **calls}), "handle", 132, 80 << 30)


def sampled(call: str, *found: tuple[float, int, int], refused: str = "") -> Samples:
    """(seconds after the load was ready, pid, per cent)."""
    made = [Sample(READY_US + round(s * 1e6) + 30_000, READY_US + round(s * 1e6), pid, p) for s, pid, p in found]
    return Samples(call, READY_US, made, refused, looks=50)


def of_load(pid: int, percent: int) -> dict[str, Samples]:
    times = tuple(0.1 + at / 5 for at in range(12))
    return {
        OLD: sampled(OLD, *((at, pid, percent) for at in times)),
        NEW: sampled(NEW, *((at, pid, percent) for at in times)),
        DEVICE: sampled(DEVICE, *((at, 0, percent) for at in times)),
    }


def seen(**other: Any) -> Observation:
    made = Observation(
        pids={"busy": PID},
        busy={"busy": 0.5},
        samples=of_load(PID, 50),
        gpm={1: 50.0, 2: 49.5, 3: 25.0},
        listed=(Listed("compute", PID, 1024 * MIB + 400 * MIB),),
        mps_clients=frozenset(),
        mps_servers=frozenset(),
        used_before_bytes=600 * MIB,
        used_bytes=600 * MIB + 1424 * MIB + 30 * MIB,
        ready_us=READY_US,
        sm_truth=None,
    )
    return replace(made, **other)


def under_mps(**other: Any) -> Observation:
    return seen(
        pids={"a": PID, "b": OTHER},
        busy={"a": 0.25, "b": 0.75},
        listed=tuple(
            Listed(name, pid, used * MIB)
            for name in ("compute", "MPS compute")
            for pid, used in ((PID, 600), (OTHER, 500))
        ),
        mps_clients=frozenset({PID, OTHER}),
        **other,
    )


def by_what(rows: Sequence[Row]) -> dict[str, Row]:
    found = {row.what: row for row in rows}
    assert len(found) == len(rows), "`what` is unique"
    missing = [what for what in found if not any(checks.lists(pattern, what) for pattern in item.WHAT)]
    assert not missing
    return found


def verdicts(rows: Mapping[str, Row]) -> dict[str, Verdict]:
    return {what: row.verdict for what, row in rows.items()}


def test_a_load_whose_share_nvml_tells_is_ok() -> None:
    rows = by_what(list(rows_of_samples.of_a_duty(seen(), 50)))
    assert set(verdicts(rows).values()) == {Verdict.OK}
    assert rows["smUtil of a load of 50 %, new call"].figure == 0.5


def test_a_sample_from_before_the_load_is_ignored() -> None:
    early = {**of_load(PID, 50), NEW: sampled(NEW, (0.4, PID, 5), (1.4, PID, 50))}
    rows = by_what(list(rows_of_samples.of_a_duty(seen(samples=early), 50)))
    assert rows["smUtil of a load of 50 %, new call"].figure == 0.5


def test_a_share_that_is_wrong_differs() -> None:
    rows = by_what(list(rows_of_samples.of_a_duty(seen(samples=of_load(PID, 80), gpm={1: 50.0, 2: 90.0}), 50)))
    assert rows["smUtil of a load of 50 %, old call"].verdict == Verdict.DIFFERS
    assert rows["GPM SM_UTIL with a load of 50 %"].verdict == Verdict.DIFFERS
    assert rows["GPM GRAPHICS_UTIL with a load of 50 %"].verdict == Verdict.OK


def test_the_old_call_that_finds_nothing_differs_and_one_that_is_refused_is_skipped() -> None:
    blackwell = {**of_load(PID, 50), OLD: sampled(OLD)}
    rows = by_what(list(rows_of_samples.of_a_duty(seen(samples=blackwell), 50)))
    assert rows["smUtil of a load of 50 %, old call"].verdict == Verdict.DIFFERS
    assert rows["smUtil of a load of 50 %, old call"].figure is None
    old_driver = {**of_load(PID, 50), NEW: sampled(NEW, refused="Function Not Found")}
    rows = by_what(list(rows_of_samples.of_a_duty(seen(samples=old_driver), 50)))
    assert rows["smUtil of a load of 50 %, new call"].verdict == Verdict.SKIPPED
    assert rows["smUtil of a load of 50 %, new call"].note == "Function Not Found"


def test_without_gpm_its_rows_say_why() -> None:
    rows = by_what(list(rows_of_samples.of_half_the_sms(seen(gpm=Refused("Not Supported", 3)))))
    assert rows["GPM SM_UTIL, kernels on half of the SMs"].verdict == Verdict.SKIPPED
    assert rows["GPM SM_UTIL, kernels on half of the SMs"].note == "Not Supported"
    assert rows["smUtil, kernels on half of the SMs"].verdict == Verdict.OK


def test_half_of_the_sms_is_half_of_the_time_with_a_kernel() -> None:
    rows = by_what(list(rows_of_samples.of_half_the_sms(seen(gpm={1: 50.0, 2: 25.0, 3: 12.0}))))
    assert rows["GPM SM_UTIL, kernels on half of the SMs"].baseline == 0.25
    assert rows["GPM SM_UTIL, kernels on half of the SMs"].verdict == Verdict.OK


def test_how_often_and_how_old_samples_are() -> None:
    rows = by_what(list(rows_of_samples.of_the_calls(seen())))
    assert rows["new call: samples come every"].figure == 0.2
    assert rows["new call: samples come every"].verdict == Verdict.OK
    assert rows["new call: age of a sample when it is first seen"].figure == 30.0
    assert rows["old and new call: largest difference between their means"].verdict == Verdict.OK


def test_samples_that_come_once_a_second_are_not_what_was_assumed() -> None:
    often = {**of_load(PID, 50), NEW: sampled(NEW, *((at, PID, 50) for at in range(4)))}
    rows = by_what(list(rows_of_samples.of_the_calls(seen(samples=often))))
    assert rows["new call: samples come every"].verdict == Verdict.DIFFERS


def test_how_often_the_devices_own_samples_come_is_only_measured() -> None:
    often = {**of_load(PID, 50), DEVICE: sampled(DEVICE, *((at / 6, 0, 50) for at in range(20)))}
    row = by_what(list(rows_of_samples.of_the_calls(seen(samples=often))))[
        "device utilisation samples: samples come every"
    ]
    assert row.verdict is Verdict.MEASURED
    assert row.figure == pytest.approx(1 / 6, abs=1e-3)


def test_a_pid_that_nvml_does_not_have_differs() -> None:
    rows = by_what(list(rows_of_samples.of_the_calls(seen(samples=of_load(OTHER, 50)))))
    assert rows["new call: names the process"].verdict == Verdict.DIFFERS
    assert str(OTHER) in rows["new call: names the process"].note


def test_calls_that_do_not_agree_differ() -> None:
    apart = {**of_load(PID, 50), OLD: of_load(PID, 90)[OLD]}
    rows = by_what(list(rows_of_samples.of_the_calls(seen(samples=apart))))
    assert rows["old and new call: largest difference between their means"].verdict == Verdict.DIFFERS


def test_what_a_process_has_beyond_what_it_allocated() -> None:
    rows = by_what(list(rows_of_lists.of_the_lists(seen(), 1024 * MIB)))
    assert rows["lists: bytes of a process beyond what it allocated"].figure == 400 * MIB
    assert rows["lists: growth of the device's used bytes beyond those of the process"].figure == 30 * MIB
    assert rows["lists: a process without MPS is in"].verdict == Verdict.OK


def test_a_process_in_no_list_differs() -> None:
    rows = by_what(list(rows_of_lists.of_the_lists(seen(listed=()), 0)))
    assert rows["lists: a process without MPS is in"].verdict == Verdict.DIFFERS
    assert rows["lists: bytes of a process beyond what it allocated"].verdict == Verdict.SKIPPED


def test_clients_that_are_credited_themselves() -> None:
    both = {NEW: sampled(NEW, (1.5, PID, 25), (1.5, OTHER, 75)), OLD: sampled(OLD), DEVICE: sampled(DEVICE)}
    rows = by_what(list(rows_of_lists.of_mps(under_mps(samples=both, gpm={2: 50.0}), 256 * MIB)))
    assert rows["MPS: smUtil goes to"].figure == "clients"
    assert rows["MPS: clients are in the list"].verdict == Verdict.OK
    assert rows["MPS: clients that the agent takes for such"].verdict == Verdict.OK
    assert rows["MPS: smUtil of the client b"].figure == 0.75
    assert rows["MPS: bytes of a client beyond what it allocated"].figure == 344 * MIB
    assert rows["MPS: GPM SM_UTIL, two clients on half of the SMs each"].verdict == Verdict.OK


def test_a_server_that_is_credited() -> None:
    server = {NEW: sampled(NEW, (1.5, 7, 90)), OLD: sampled(OLD), DEVICE: sampled(DEVICE)}
    listed = (Listed("compute", 7, 30 * MIB), Listed("MPS compute", PID, 600 * MIB))
    made = replace(under_mps(samples=server, mps_servers=frozenset({7})), listed=listed)
    rows = by_what(list(rows_of_lists.of_mps(made, 256 * MIB)))
    assert rows["MPS: smUtil goes to"].figure == "server"
    assert rows["MPS: the server is in the list"].figure == "compute"
    assert rows["MPS: clients are in the list"].verdict == Verdict.DIFFERS
    assert rows["MPS: smUtil of the client a"].verdict == Verdict.SKIPPED


def test_no_other_process_is_credited_or_taken_for_a_client() -> None:
    nothing = {call: sampled(call) for call in (OLD, NEW, DEVICE)}
    made = replace(under_mps(samples=nothing), listed=(), mps_clients=frozenset())
    rows = by_what(list(rows_of_lists.of_mps(made, 256 * MIB)))
    assert rows["MPS: smUtil goes to"].figure == "none"
    assert rows["MPS: smUtil goes to"].verdict == Verdict.DIFFERS
    assert rows["MPS: clients that the agent takes for such"].verdict == Verdict.DIFFERS


def copies(direction: str, **other: Any) -> CopyRates:
    with_it, against_it = FieldReadings((1, 6, 12), 64, 1e-9), FieldReadings((7, 7, 8), 64, 1e-9)
    made = CopyRates(direction, 10e9, with_it, against_it, 11e9, 11e9)
    return replace(made, **other)


def test_a_counter_in_bytes_with_headers_is_ok_and_one_in_kilobytes_differs() -> None:
    rows = by_what(list(rows_of_costs.of_copies(copies(TO_DEVICE, gpm=11e6))))
    assert rows["PCIe to the device: field 198 ÷ copied"].verdict == Verdict.OK
    assert rows["PCIe to the device: field 198 is cumulative"].verdict == Verdict.OK
    assert rows["PCIe to the device: GPM 21 ÷ copied"].verdict == Verdict.DIFFERS
    assert rows["PCIe to the device: GPM 21 ÷ copied"].figure == 0.0011


def test_the_two_directions_have_fields_of_their_own() -> None:
    rows = by_what(list(rows_of_costs.of_copies(copies(FROM_DEVICE, field=Refused("Not Supported")))))
    assert rows["PCIe from the device: field 197 ÷ copied"].verdict == Verdict.SKIPPED
    assert rows["PCIe from the device: field 197 is cumulative"].note == "Not Supported"
    assert rows["PCIe from the device: GPM 20 ÷ copied"].verdict == Verdict.OK


@pytest.mark.parametrize(
    ("values", "bits", "verdict"),
    [
        ((1, 2, 3), 64, Verdict.OK),
        ((1, 2, 2, 3), 64, Verdict.OK),
        ((1, 3, 2), 64, Verdict.DIFFERS),
        ((3, 3, 3), 64, Verdict.DIFFERS),
        (((1 << 32) - 5, 5), 32, Verdict.OK),
        (((1 << 32) - 5, 5), 64, Verdict.DIFFERS),
    ],
)
def test_what_goes_up_and_down_is_not_cumulative(values: tuple[int, ...], bits: int, verdict: Verdict) -> None:
    rows = by_what(list(rows_of_costs.of_copies(copies(TO_DEVICE, field=FieldReadings(values, bits, 1.0)))))
    assert rows["PCIe to the device: field 198 is cumulative"].verdict is verdict


def test_a_narrow_counter_that_wraps_many_times_in_a_second_tells_the_true_rate() -> None:
    values = tuple(look * 10**9 % (1 << 32) for look in range(51))
    rows = by_what(list(rows_of_costs.of_copies(copies(TO_DEVICE, true=50e9, field=FieldReadings(values, 64, 1.0)))))
    ratio = rows["PCIe to the device: field 198 ÷ copied"]
    assert (ratio.verdict, ratio.figure) == (Verdict.OK, 1.0)
    assert rows["PCIe to the device: field 198 is cumulative"].note.endswith(
        "wrapped 11 times, and NVML gives it 64 bits"
    )


def test_a_counter_that_was_reset_has_no_rate() -> None:
    rows = by_what(list(rows_of_costs.of_copies(copies(TO_DEVICE, field=FieldReadings((9, 8), 64, 1.0)))))
    assert rows["PCIe to the device: field 198 ÷ copied"].verdict is Verdict.SKIPPED


def test_both_fields_are_looked_at_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    times = SimpleNamespace(monotonic=lambda: clock[-1], sleep=lambda seconds: clock.append(clock[-1] + seconds))
    monkeypatch.setattr(pcie, "time", times)
    readings = iter([(10, 1), (20, 3), (30, 5)])
    kinds = {"NVML_VALUE_TYPE_UNSIGNED_INT": 1, "NVML_VALUE_TYPE_UNSIGNED_LONG_LONG": 3}

    def fields(*_: Any) -> list[Any]:
        tx, rx = next(readings)
        wide = SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=tx))
        return [wide, SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=rx))]

    tx, rx = _watched(a_gpu(nvmlDeviceGetFieldValues=fields, **kinds), 0.03)
    assert isinstance(tx, FieldReadings)
    assert isinstance(rx, FieldReadings)
    assert (tx.values, tx.bits, rx.values, rx.bits) == ((10, 20, 30), 64, (1, 3, 5), 32)
    assert tx.seconds == pytest.approx(0.04)


def test_one_field_that_nvml_refuses_refuses_both() -> None:
    def fields(*_: Any) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=0), SimpleNamespace(nvmlReturn=3)]

    assert _watched(a_gpu(nvmlDeviceGetFieldValues=fields), 0.0) == (Refused("Not Supported", 3),) * 2


def reading(ratio: float | None) -> DeviceReading:
    device = Device(0, DeviceUuid("GPU-0"), "H", "", 132, None)
    return DeviceReading(device, sm_activity_ratio=ratio, sm_activity_source=None if ratio is None else "gpm")


def test_the_agents_calls_and_what_it_makes_of_them() -> None:
    cost = Cost(2.5, {"nvmlDeviceGetMemoryInfo": 0.1}, {"nvmlDeviceGetMemoryInfo": 1.0}, {}, (reading(0.49),))
    rows = by_what([*rows_of_costs.of_cost(cost, 0.5), *rows_of_costs.of_sources({"field values": Refused("No")})])
    assert rows["agent: cost of nvmlDeviceGetMemoryInfo"].figure == 0.1
    assert rows["agent: SM activity of the device"].verdict == Verdict.OK
    assert rows["agent: calls that NVML refuses"].verdict == Verdict.OK
    assert rows["cost of field values"].verdict == Verdict.SKIPPED


def test_a_refused_call_of_the_agents_is_named() -> None:
    cost = Cost(2.5, {}, {}, {"nvmlDeviceGetTemperatureV:not_supported": 1}, (reading(None),))
    rows = by_what(list(rows_of_costs.of_cost(cost, 0.5)))
    assert rows["agent: calls that NVML refuses"].verdict == Verdict.DIFFERS
    assert "TemperatureV" in rows["agent: calls that NVML refuses"].note
    assert rows["agent: SM activity of the device"].verdict == Verdict.DIFFERS


def test_every_call_is_timed_and_everything_else_is_handed_through() -> None:
    timed = TimedBinding(SimpleNamespace(nvmlDeviceGetCount=lambda: 3, NVML_SUCCESS=0))
    assert timed.nvmlDeviceGetCount() == 3
    assert timed.NVML_SUCCESS == 0
    assert [len(of) for of in timed.durations_ns.values()] == [1]
    assert "nvmlDeviceGetCount" in dir(timed)


def test_nothing_new_is_no_refusal() -> None:
    def raising(value: int) -> Any:
        def call(*_: Any) -> Any:
            raise NVMLError(value)

        return call

    for value, refused in ((6, ""), (0, ""), (3, "Not Supported")):
        found = Samples(OLD, 0)
        found.look(a_gpu(nvmlDeviceGetProcessUtilization=raising(value)))
        assert found.refused == refused
        assert found.looks == 1


def test_a_sample_is_counted_once_however_often_it_is_reported() -> None:
    one = SimpleNamespace(timeStamp=5_000_000, pid=PID, smUtil=40)
    too_much = SimpleNamespace(timeStamp=6_000_000, pid=PID, smUtil=4_000_000)
    found = Samples(NEW, 1_000_000)
    for _ in range(2):
        found.look(a_gpu(nvmlDeviceGetProcessesUtilizationInfo=lambda *_: [one, too_much]))
    assert [sample.percent for sample in found.found] == [40]


def test_a_binding_without_a_function_refuses() -> None:
    answer = asked(API, lambda: API.nvmlGpmSampleGet())
    assert isinstance(answer, Refused)
    assert "too old" in answer.why


def test_a_process_may_be_in_several_lists() -> None:
    found = (Listed("compute", PID, None), Listed("graphics", PID, 5), Listed("graphics", OTHER, 9))
    assert lists_of(found, PID) == "compute + graphics"
    assert bytes_of(found, PID) == 5
    assert lists_of(found, 1) == "none"
    assert bytes_of(found, 1) is None


@pytest.mark.parametrize("call", [OLD, NEW, DEVICE])
def test_the_time_between_samples_is_that_of_one_process(call: str) -> None:
    found = sampled(call, (1.0, PID, 1), (1.1, OTHER, 1), (2.0, PID, 1), (2.1, OTHER, 1))
    assert found.period_seconds() == pytest.approx(1.0)
    assert sampled(call, (1.0, PID, 1)).period_seconds() is None
    assert samples.largest_difference(found, sampled(call)) is None
