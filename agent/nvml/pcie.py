# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""PCIe bytes per second of one device, from the cheapest source that it has, and what its link can carry.

Cumulative field values first (cheap, they wrap), then GPM (handed in), then nvmlDeviceGetPcieThroughput, which measures
for 20 ms per direction and is therefore asked on a thread of its own: a tick never waits for it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from agent.core.clock import NS_PER_SECOND
from agent.nvml.calls import Calls

FIELDS: Final = (197, 198)  # NVML_FI_DEV_PCIE_COUNT_{TX,RX}_BYTES
THROUGHPUT: Final = "nvmlDeviceGetPcieThroughput"


# Bytes per second of one lane in one direction, by generation, after the line code (PCI-SIG; of 6 and later less FEC).
LANE: Final = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_600_000,
    4: 1_969_200_000,
    5: 3_938_400_000,
    6: 7_563_000_000,
    7: 15_125_000_000,
}


def link_bytes_per_second(calls: Calls, owner: str, handle: Any) -> int | None:
    """Of one direction, packets' headers included; None where NVML does not say. Raises what `try_call` does.

    The generation is the highest of device and slot: the present one falls while the device idles, its width does not.
    """
    generation = calls.try_call(owner, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = calls.first(owner, ("nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth"), handle)
    lane = None if generation is None else LANE.get(int(generation))
    return lane * int(width) if lane and width else None


@dataclass(frozen=True, slots=True)
class PcieRates:
    """Bytes per second. tx is device to host."""

    tx: float | None = None
    rx: float | None = None


def counter_delta(previous: int, current: int, bits: int) -> int | None:
    """Bytes between two readings of a counter that wraps; None when it was reset instead.

    A 64-bit field may carry a 32-bit hardware counter: going backwards from its upper half by a wrap is believed, and
    anything else that goes backwards is a reset.
    """
    if current >= previous:
        return current - previous
    for width in (32, 64) if bits == 64 else (bits,):
        wrapped = current + (1 << width) - previous
        if previous < 1 << width and previous >= 1 << (width - 1) and wrapped < 1 << (width - 1):
            return wrapped
    return None


class PcieCounters:
    """The cumulative counters of one device."""

    def __init__(self, calls: Calls, owner: str) -> None:
        self._calls, self._owner = calls, owner
        self._previous: tuple[int, list[int | None]] | None = None
        self.narrow = False  # 32 bits: wraps within a tick on a fast link, so GPM is to be preferred

    def read(self, handle: Any, now_ns: int) -> PcieRates | None:
        """Rates since the previous call; None where there are no counters, empty rates the first time."""
        values = self._calls.try_call(self._owner, "nvmlDeviceGetFieldValues", handle, list(FIELDS))
        if values is None or not self._usable(values):
            return None
        current = [_scalar(self._calls.api, value) for value in values]
        bits = [_bits(self._calls.api, value) for value in values]
        self.narrow = 32 in bits
        previous, self._previous = self._previous, (now_ns, current)
        if previous is None or now_ns <= previous[0]:
            return PcieRates()
        seconds = (now_ns - previous[0]) / NS_PER_SECOND
        deltas = [
            None if old is None or new is None else counter_delta(old, new, width)
            for old, new, width in zip(previous[1], current, bits, strict=True)
        ]
        return PcieRates(*(None if delta is None else delta / seconds for delta in deltas))

    def _usable(self, values: Any) -> bool:
        codes = {value.nvmlReturn for value in values}
        api = self._calls.api
        if codes <= {api.NVML_ERROR_NOT_SUPPORTED, api.NVML_ERROR_INVALID_ARGUMENT}:
            self._calls.errors["nvmlDeviceGetFieldValues:pcie_not_supported"] += 1
            self._calls.refuse(self._owner, "nvmlDeviceGetFieldValues")
        return codes == {0}


class PcieThroughput:
    """Asks for throughput on its own thread; each call hands over what the one before has fetched."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[str, Future[tuple[float, float]]] = {}
        self._last: dict[str, PcieRates] = {}

    def read(self, owner: str, handle: Any) -> PcieRates | None:
        """The newest finished measurement of this device (a 20 ms window), None before there is one."""
        if not self._calls.supports(owner, THROUGHPUT):
            return None
        future = self._pending.get(owner)
        if future is not None and not future.done():
            return self._last.get(owner)
        if future is not None:
            self._take(owner, self._pending.pop(owner))
        if self._calls.supports(owner, THROUGHPUT):
            self._pool = self._pool or ThreadPoolExecutor(1, "pcie-throughput")
            self._pending[owner] = self._pool.submit(self._measure, handle)
        return self._last.get(owner)

    def close(self) -> None:
        """Wait for the call under way (≤ 40 ms): NVML may not be shut down below it."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._pending.clear()
        self._last.clear()

    def _take(self, owner: str, future: Future[tuple[float, float]]) -> None:
        self._last.pop(owner, None)
        try:
            self._last[owner] = PcieRates(*future.result())
        except self._calls.api.NVMLError as error:
            self._calls.judge(owner, THROUGHPUT, error)

    def _measure(self, handle: Any) -> tuple[float, float]:
        api = self._calls.api
        tx = api.nvmlDeviceGetPcieThroughput(handle, api.NVML_PCIE_UTIL_TX_BYTES)
        rx = api.nvmlDeviceGetPcieThroughput(handle, api.NVML_PCIE_UTIL_RX_BYTES)
        return float(tx) * 1e3, float(rx) * 1e3  # NVML documents KB/s here and MiB/s in GPM


def _scalar(api: Any, field: Any) -> int | None:
    members = {
        api.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        api.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        api.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    }
    member = members.get(field.valueType)
    return None if member is None else int(getattr(field.value, member))


def _bits(api: Any, field: Any) -> int:
    return 32 if field.valueType == api.NVML_VALUE_TYPE_UNSIGNED_INT else 64
