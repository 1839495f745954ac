# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Steps of training with PyTorch, on demand, and what CUPTI says of their kernels. Stands alone.

Lines on standard input: `open`, `run SECONDS`, `profile SECONDS`, `end`. Lines of JSON on standard output, each with an
`event`: imported; opened, or no GPU; progress (steps done and waited for, again and again) and ran; profiled. Times are
CLOCK_MONOTONIC in ns.

A step's SM time is what each kernel took times the part of the SMs that its blocks can be on.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 4096
LAYERS = 6
PAUSE_SECONDS = 0.004
PROGRESS_NS = 200_000_000
WARM_UP_STEPS = 5


class Training:
    """A stack of linear layers in bfloat16: a batch copied in, forward, backward, an update, the loss copied out."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        layers = []
        for _ in range(LAYERS):
            layers += [torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
        self.update = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.given = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16).pin_memory()
        self.batch = torch.empty_like(self.given, device="cuda")
        self.steps = 0

    def step(self) -> None:
        """Runs one step, waits for it, and does the host's part."""
        self.batch.copy_(self.given, non_blocking=True)
        loss = self.model(self.batch).float().square().mean()
        loss.backward()
        self.update.step()
        self.update.zero_grad()
        loss.item()
        self.steps += 1
        time.sleep(PAUSE_SECONDS)

    def run(self, seconds: float) -> None:
        """So long, with a line of progress now and then, and at the end."""
        self.torch.cuda.synchronize()
        begin_ns, before = time.monotonic_ns(), self.steps
        reported_ns = begin_ns
        say("progress", at_ns=begin_ns, steps=0)
        while (now_ns := time.monotonic_ns()) - begin_ns < seconds * 1e9:
            if now_ns - reported_ns >= PROGRESS_NS:
                reported_ns = now_ns
                say("progress", at_ns=now_ns, steps=self.steps - before)
            self.step()
        self.torch.cuda.synchronize()
        say("progress", at_ns=time.monotonic_ns(), steps=self.steps - before)
        say("ran", steps=self.steps - before, **self.memory())

    def profile(self, seconds: float) -> None:
        """Runs steps under CUPTI."""
        profiler = self.torch.profiler
        self.torch.cuda.synchronize()
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            begin_ns, before = time.monotonic_ns(), self.steps
            while time.monotonic_ns() - begin_ns < seconds * 1e9:
                self.step()
            self.torch.cuda.synchronize()
            end_ns = time.monotonic_ns()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profile.export_chrome_trace(str(trace))
            found = json.loads(trace.read_text(errors="replace"))
        sms = self.torch.cuda.get_device_properties(0).multi_processor_count
        profile = totals(found["traceEvents"], sms)
        say("profiled", begin_ns=begin_ns, end_ns=end_ns, steps=self.steps - before, **profile, **self.memory())

    def memory(self) -> dict[str, int]:
        """Bytes that the caching allocator holds, and gave out."""
        cuda = self.torch.cuda
        return {"reserved_bytes": cuda.memory_reserved(), "allocated_bytes": cuda.memory_allocated()}


def totals(events: Iterable[dict[str, Any]], sms: int) -> dict[str, float | int]:
    """Totals of a trace in Chrome's format, whose times are in µs."""
    kernels = [event for event in events if event.get("cat") == "kernel" and "dur" in event]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    return {
        "kernels": len(kernels),
        "kernel_seconds": sum(event["dur"] for event in kernels) / 1e6,
        "busy_seconds": union([(event["ts"], event["ts"] + event["dur"]) for event in kernels]) / 1e6,
        "sm_seconds": sum(event["dur"] * filled(event, sms) for event in kernels) / 1e6,
        "to_device_bytes": copied(copies, "HtoD"),
        "from_device_bytes": copied(copies, "DtoH"),
    }


def filled(kernel: dict[str, Any], sms: int) -> float:
    """The part of the SMs that its blocks can be on, 0–1; all of them where the trace has no grid."""
    blocks = 1
    for size in kernel.get("args", {}).get("grid", [sms]):
        blocks *= int(size)
    return min(1.0, blocks / sms)


def copied(copies: Iterable[dict[str, Any]], way: str) -> int:
    """Bytes of the copies of that kind."""
    return sum(int(event.get("args", {}).get("bytes", 0)) for event in copies if way in str(event.get("name")))


def union(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of them lasted."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def say(event: str, **rest: Any) -> None:
    """Writes one line of JSON."""
    print(json.dumps({"event": event, **rest}), flush=True)


def main() -> None:
    """Works until `end`, or the end of standard input."""
    torch = importlib.import_module("torch")
    say("imported", version=torch.__version__)  # the driver is not asked anything before `open`
    training: Training | None = None
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "end":
            return
        if training is None:
            if not torch.cuda.is_available():
                say("no GPU")
                return
            training = Training(torch)
            for _ in range(WARM_UP_STEPS):
                training.step()
        if word == "open":
            training.profile(0.05)  # the first one takes CUPTI seconds
            say("opened", **training.memory())
        elif word == "run":
            training.run(float(seconds))
        elif word == "profile":
            training.profile(float(seconds))


if __name__ == "__main__":
    main()
