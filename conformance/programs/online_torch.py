# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""PyTorch inference as a service: open-loop arrivals, one request at a time, each waited for by cudaStreamSynchronize.

Stands alone: PyTorch and the standard library, random weights. Says `ready` once it is warm; then each `g` on standard
input is a round: the arrivals of --trace, or Poisson ones, and at their end a line of JSON. `q`, or the end of standard
input, ends it. A latency counts from the moment at which the request was to arrive.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
LEAST_WARMING = 30
PR_SET_TIMERSLACK = 29
CLASSES = 1000
PIXELS = 224
CHANNELS = 3

torch: Any = None


def transformer(options: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    """An encoder and a head, as BERT has them, and what they do: (batch, length, width) → (batch, CLASSES)."""
    nn, width = torch.nn, options.width
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
    head = nn.Linear(width, CLASSES)

    def forward(batch: Any) -> Any:
        return head(encoder(batch)[:, 0])

    return nn.ModuleList([encoder, head]), forward


def resnet(options: argparse.Namespace) -> tuple[Any, Callable[[Any], Any]]:
    """Four stages of residual blocks, as ResNet-50 has them, and what they do: batch of pictures → (batch, CLASSES)."""
    nn, width = torch.nn, options.width
    stem = nn.Sequential(
        nn.Conv2d(CHANNELS, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    blocks, given = [], width
    for stage in range(4):
        for number in range(options.layers):
            inner = width * 2**stage
            blocks.append(bottleneck(inner, given, 2 if stage and not number else 1))
            given = 4 * inner
    head = nn.Linear(given, CLASSES)

    def forward(x: Any) -> Any:
        x = stem(x)
        for _, step in blocks:
            x = step(x)
        return head(x.mean((2, 3)))

    return nn.ModuleList([stem, *(modules for modules, _ in blocks), head]), forward


def bottleneck(inner: int, given: int, stride: int) -> tuple[Any, Callable[[Any], Any]]:
    """A residual block, `given` channels in, 4 × `inner` out: its modules, and what it does."""
    nn, relu, out = torch.nn, torch.nn.functional.relu, 4 * inner

    def convolved(a: int, b: int, size: int, step: int) -> Any:
        return nn.Sequential(nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b))

    first, second, third = (
        convolved(given, inner, 1, 1),
        convolved(inner, inner, 3, stride),
        convolved(inner, out, 1, 1),
    )
    around = convolved(given, out, 1, stride) if given != out or stride != 1 else nn.Identity()

    def forward(x: Any) -> Any:
        return relu(third(relu(second(relu(first(x))))) + around(x))

    return nn.ModuleList([first, second, third, around]), forward


def request(options: argparse.Namespace) -> Callable[[], None]:
    """What one request is: a batch to the device, the model, the answer back, and a wait for all of that."""
    kind, on_gpu = getattr(torch, options.dtype), options.device.startswith("cuda")
    with torch.device(options.device):  # where random weights are made faster
        modules, forward = {"transformer": transformer, "resnet": resnet}[options.model](options)
    modules.to(dtype=kind)
    modules.eval()
    shape: tuple[int, ...] = (options.batch, CHANNELS, PIXELS, PIXELS)
    if options.model == "transformer":
        shape = (options.batch, options.length, options.width)
    given, answer = torch.randn(shape).to(kind), torch.empty((options.batch, CLASSES), dtype=kind)
    if on_gpu:
        given, answer = given.pin_memory(), answer.pin_memory()
    there = torch.empty(shape, dtype=kind, device=options.device)
    wait = torch.cuda.current_stream().synchronize if on_gpu else lambda: None

    def serve() -> None:
        with torch.inference_mode():
            there.copy_(given, non_blocking=True)
            answer.copy_(forward(there), non_blocking=True)
        wait()

    return serve


def warm(serve: Callable[[], None], seconds: float) -> float:
    """Until nothing is done for the first time any more; returns how long a request takes then, in seconds."""
    took: list[float] = []
    begun = time.monotonic()
    while len(took) < LEAST_WARMING or time.monotonic() - begun < seconds:
        before = time.monotonic()
        serve()
        took.append(time.monotonic() - before)
    return statistics.median(took[-LEAST_WARMING // 2 :])


def arrivals(options: argparse.Namespace) -> list[float]:
    """Arrivals of one round, in seconds since its start, ascending."""
    if options.trace:
        return [float(line) for line in options.trace.read_text().split()]
    source, at, found = random.Random(options.seed), 0.0, []
    while (at := at + source.expovariate(options.rate)) < options.seconds:
        found.append(at)
    return found


def play(serve: Callable[[], None], due: Sequence[float], path: Path | None) -> dict[str, Any]:
    """One round. A request is in the log as soon as it is served: arrival, latency and time of service, in seconds."""
    latencies, services = [], []
    log = path.open("w") if path else None
    started_ns = time.monotonic_ns()
    started = started_ns / 1e9
    for at in due:
        left = started + at - time.monotonic()
        if left > 0:
            time.sleep(left)
        begun = time.monotonic()
        serve()
        ended = time.monotonic()
        latencies.append(ended - started - at)
        services.append(ended - begun)
        if log:
            log.write(f"{at:.9f} {latencies[-1]:.9f} {services[-1]:.9f}\n")
            log.flush()
    elapsed = time.monotonic() - started
    if log:
        log.close()
    return {
        "program": "online_torch",
        "requests": len(latencies),
        "elapsed_seconds": elapsed,
        "busy_ratio": sum(services) / elapsed if latencies else 0.0,
        "started_monotonic_ns": started_ns,
        "latency_seconds": summary(latencies),
        "service_seconds": summary(services),
    }


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Quantiles by the nearest rank, and the mean; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    ranks = {name: max(0, math.ceil(q * len(ordered)) - 1) for name, q in QUANTILES.items()}
    return {**{name: ordered[rank] for name, rank in ranks.items()}, "mean": statistics.fmean(ordered)}


def facts(options: argparse.Namespace, service_seconds: float) -> dict[str, Any]:
    """What a reader of the figures needs to know."""
    return {
        "model": options.model,
        "layers": options.layers,
        "width": options.width,
        "batch": options.batch,
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device,
        "torch": torch.__version__,
        "service_seconds": service_seconds,
    }


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=["transformer", "resnet"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--layers", type=int, help="of the transformer (12), or blocks in each stage (4)")
    parser.add_argument("--width", type=int, help="of the transformer (768), or channels at first (64)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="of a sequence")
    parser.add_argument("--trace", type=Path, help="arrivals of each round: seconds since its start, one per line")
    parser.add_argument("--rate", type=float, default=100.0, help="without --trace: Poisson arrivals per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="without --trace: of a round")
    parser.add_argument("--seed", type=int, default=1, help="without --trace: of the arrivals")
    parser.add_argument("--log", type=Path, help="of the last round, a line per request: arrival_s latency_s service_s")
    parser.add_argument("--facts", type=Path, help="JSON of what runs, written before `ready`")
    parser.add_argument("--warm-seconds", type=float, default=1.0)
    options = parser.parse_args()
    layers, width = (12, 768) if options.model == "transformer" else (4, 64)
    options.layers, options.width = options.layers or layers, options.width or width
    return options


def main() -> None:
    """Rounds, until standard input ends."""
    global torch
    options = parsed()
    torch = importlib.import_module("torch")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # arrivals are not to be late by the default 50 µs
    torch.manual_seed(1)
    serve = request(options)
    service_seconds = warm(serve, options.warm_seconds)
    if options.facts:
        options.facts.write_text(json.dumps(facts(options, service_seconds)) + "\n")
    gc.collect()
    gc.freeze()
    gc.disable()  # no request is to wait for it
    print("ready", flush=True)
    while (asked := os.read(0, 1)) and asked != b"q":
        if asked == b"g":
            print(json.dumps(play(serve, arrivals(options), options.log)), flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
