# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Our own workloads (sim/workloads) as a load of which all is known: how many kernels, how long, on how many SMs.

A kernel of theirs loops as often as it is asked to, so its length is known once it was timed with the device to itself:
`pace_of`. A workload says once a second how far it is; `Workload.kernels` has these lines with the time of each.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Final

from conformance.host import Host

# So that the first device is the first for CUDA and for NVML, however fast the others are.
SAME_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
_PROGRESS: Final = re.compile(r"[\d.]+ s: \d+ steps, (\d+) kernels")
_FIRST_ITERATIONS_PER_US: Final = 20
_READY_SECONDS: Final = 30.0
_END_SECONDS: Final = 15.0
_SOLO_NS: Final = 1_000_000


class WorkloadError(Exception):
    """A workload of ours failed; the message has its stderr."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the spin kernel's loop is with one block of 1,024 threads to an SM.

    `ratio`: the true length of a kernel ÷ the one that is asked for with `iterations_per_us`.
    """

    iterations_per_us: int
    ratio: float

    @property
    def options(self) -> tuple[str, ...]:
        """For the workloads, which need not measure it themselves then: that wants an idle device."""
        return ("--iterations-per-us", str(self.iterations_per_us))

    def seconds(self, kernels: float, kernel_us: float) -> float:
        """What so many kernels of that asked-for length take, one after another."""
        return kernels * kernel_us * self.ratio / 1e6


def tuned(
    seconds_per_kernel: float, iterations_per_us: int = _FIRST_ITERATIONS_PER_US, asked_ns: int = _SOLO_NS
) -> Pace:
    """Iterations with which kernels are about as long as asked for, from kernels that were timed with others."""
    ratio = seconds_per_kernel * 1e9 / asked_ns
    better = max(1, round(iterations_per_us / ratio))
    return Pace(better, ratio * better / iterations_per_us)


@dataclass(slots=True)
class Workload:
    """A running `offline` or `online`. `kernels`: (CLOCK_MONOTONIC ns, kernels launched by then), as it reported."""

    process: Popen[str]
    summary_file: Path
    kernels: list[tuple[int, int]] = field(default_factory=list)
    _ready: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.process.pid

    def wait_ready(self) -> None:
        """Until its kernels are loaded and its memory is there. WorkloadError when it ends before."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self._ready.wait(0.02):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise WorkloadError(self._said("did not become ready"))

    def require_alive(self) -> None:
        """WorkloadError when it ended by itself."""
        if self.process.poll() is not None:
            raise WorkloadError(self._said("ended"))

    def finish(self) -> dict[str, Any]:
        """Asks it to end where it has not yet, and returns its summary. WorkloadError when it has none."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except TimeoutExpired:
            raise WorkloadError(f"{self.summary_file.stem} does not end") from None
        if self._reader is not None:
            self._reader.join(_END_SECONDS)
        return self._summary()

    def read(self) -> None:
        """Reads its lines to the last one; on a thread of its own."""
        assert self.process.stdout
        with suppress(ValueError):  # closed from outside, which ends the reading
            for line in self.process.stdout:
                self._note(line, time.monotonic_ns())

    def start_reading(self) -> None:
        """`read`, on a thread of its own."""
        self._reader = threading.Thread(target=self.read, daemon=True)
        self._reader.start()

    def _note(self, line: str, now_ns: int) -> None:
        if line.strip() == "ready":
            self._ready.set()
        elif found := _PROGRESS.match(line):
            self.kernels.append((now_ns, int(found[1])))

    def _summary(self) -> dict[str, Any]:
        try:
            summary = json.loads(self.summary_file.read_text())
        except (OSError, ValueError):
            raise WorkloadError(self._said("left no summary")) from None
        assert isinstance(summary, dict)
        return summary

    def _said(self, what: str) -> str:
        words = ""
        if self.process.poll() is not None and self.process.stderr is not None:
            words = self.process.stderr.read().strip()
        return f"{self.summary_file.stem} {what}: {words or 'it says nothing'}"


def start(
    host: Host,
    name: str,
    words: Sequence[str],
    extra: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Workload:
    """`words`: the program and its options; `before`: what starts it, and becomes it. Its summary is NAME.json."""
    summary = host.folder / f"{name}.json"
    summary.unlink(missing_ok=True)
    command = [*before, str(host.workloads / words[0]), *words[1:], "--json", str(summary)]
    workload = Workload(host.start(command, {**SAME_ORDER, **(extra or {})}), summary)
    workload.start_reading()
    return workload


@contextmanager
def running(host: Host, name: str, words: Sequence[str], extra: Mapping[str, str] | None = None) -> Iterator[Workload]:
    """One that is ready; ended after the block, whatever happened in it."""
    workload = start(host, name, words, extra)
    try:
        workload.wait_ready()
        yield workload
    finally:
        host.end(workload.process)


def steps(pace: Pace, *, kernels: int, kernel_us: int, blocks: int, host_us: float = 0) -> list[str]:
    """`offline` in steps of so many kernels on `blocks` SMs, and a pause; until it is ended."""
    shape = ["--kernels", str(kernels), "--kernel-us", str(kernel_us), "--blocks", str(blocks), "--threads", "1024"]
    return ["offline", *shape, "--host-us", f"{host_us:g}", *pace.options, "--seconds", "0", "--verbose"]


def pause_us(pace: Pace, kernels: int, kernel_us: int, duty_cycle: float) -> float:
    """The host's pause after so many kernels with which they take that part of the time; 0 for all of it."""
    return pace.seconds(kernels, kernel_us) * 1e6 * (1 / duty_cycle - 1)


def pace_of(host: Host, blocks: int, seconds: float) -> Pace:
    """Times the kernel with the device to itself, one block to each SM. WorkloadError when that fails.

    The queue is never empty, so what is timed is the kernels alone; the first second, in which clocks rise, is left out
    where there is more than that.
    """
    first = Pace(_FIRST_ITERATIONS_PER_US, 1.0)
    words = steps(first, kernels=100, kernel_us=_SOLO_NS // 1000, blocks=blocks)
    with running(host, "solo", [*words, "--never-sync", "--depth", "16"]) as workload:
        time.sleep(seconds)
        workload.require_alive()
        summary = workload.finish()
    return tuned(seconds_per_kernel(workload.kernels, summary))


def seconds_per_kernel(progress: Sequence[tuple[int, int]], summary: Mapping[str, Any]) -> float:
    """From the first line of progress to the last; from the summary where there are not two. ValueError: no kernel."""
    if len(progress) > 1 and progress[-1][1] > progress[0][1]:
        return (progress[-1][0] - progress[0][0]) / 1e9 / (progress[-1][1] - progress[0][1])
    if not summary["kernels"]:
        raise ValueError("the workload launched no kernel")
    return float(summary["elapsed_seconds"]) / int(summary["kernels"])


def busy_ratio(summary: Mapping[str, Any], pace: Pace, kernel_us: float) -> float:
    """Share of its time in which a workload's kernels ran, by its own count."""
    return pace.seconds(int(summary["kernels"]), kernel_us) / float(summary["elapsed_seconds"])
