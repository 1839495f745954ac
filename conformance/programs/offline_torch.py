# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Offline PyTorch work: `train`, steps of a small transformer with AdamW, or `long`, matrix products of
some milliseconds each, queued deep.

Stands alone: PyTorch and the standard library, random weights and data. Says `ready` once it is warm; then `g` on
standard input lets it work, `p` has it finish its step and print a line of JSON, `q`, or the end of standard input,
ends it. SIGTERM does so at the end of the step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

WARMING_STEPS = 5
CLASSES = 1000
MULTIPLE = 256  # what a matrix' size is rounded to
NOTHING = b"-"

torch: Any = None
ended = False
idle = True


def end(*_: Any) -> None:
    """Ends it at the end of the step, at once where there is none."""
    global ended
    ended = True
    if idle:
        sys.exit(0)


def train(options: argparse.Namespace, found: dict[str, Any]) -> Callable[[], None]:
    """A step: forward, backward, AdamW, and a wait for the loss, as training loops have it."""
    nn, width = torch.nn, options.width
    with torch.device(options.device):  # where random weights are made faster
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        head = nn.Linear(width, CLASSES)
    model = nn.ModuleList([encoder, head]).to(dtype=getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tensor(options, (options.batch, options.length, width))
    wanted = torch.randint(CLASSES, (options.batch,), device=options.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(head(encoder(batch)[:, 0]).float(), wanted)
        loss.backward()
        optimizer.step()
        loss.item()

    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(WARMING_STEPS):
        step()
    return step


def long(options: argparse.Namespace, found: dict[str, Any]) -> Callable[[], None]:
    """A step: `depth` products queued one behind another, and a wait for the last one."""
    size = options.size
    for _ in range(2 if options.kernel_ms else 0):  # the time grows with the third power of the size, not exactly
        took = kernel_seconds(product(options, size), options)
        size = fitting(size, took, options.kernel_ms / 1e3)
    launch = product(options, size)
    found.update(size=size, kernel_seconds=kernel_seconds(launch, options))

    def step() -> None:
        for _ in range(options.depth):
            launch()
        wait(options)

    return step


def product(options: argparse.Namespace, size: int) -> Callable[[], None]:
    """A product of two square matrices, not waited for."""
    left, right = tensor(options, (size, size)), tensor(options, (size, size))
    out = torch.empty_like(left)

    def launch() -> None:
        torch.mm(left, right, out=out)

    return launch


def fitting(size: int, took_seconds: float, wanted_seconds: float) -> int:
    """The size of a matrix whose product takes as long as wanted, at most four times the one that was tried."""
    factor = math.pow(wanted_seconds / took_seconds, 1 / 3)
    rounded = round(size * factor / MULTIPLE) * MULTIPLE
    return max(MULTIPLE, min(4 * size, rounded))


def tensor(options: argparse.Namespace, shape: tuple[int, ...]) -> Any:
    """A tensor of random numbers, on the device."""
    return torch.randn(shape, device=options.device).to(getattr(torch, options.dtype))


def wait(options: argparse.Namespace) -> None:
    """Waits for everything that was launched."""
    if options.device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()


def kernel_seconds(work: Callable[[], None], options: argparse.Namespace) -> float:
    """The median time that it takes on the device, by the device's own clock, once it is warm."""
    work()
    wait(options)
    return statistics.median(timed(work, options) for _ in range(3))


def timed(work: Callable[[], None], options: argparse.Namespace) -> float:
    """Duration of one run, in seconds."""
    if not options.device.startswith("cuda"):
        begun = time.monotonic()
        work()
        return time.monotonic() - begun
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def asked() -> bytes:
    """A byte of standard input, b"" at its end."""
    readable, _, _ = select.select([0], [], [], 0)
    return os.read(0, 1) if readable else NOTHING


def work(step: Callable[[], None], log: TextIO | None, done: int) -> tuple[int, bytes]:
    """Steps until something is asked for; returns that, and the steps so far. Log: CLOCK_MONOTONIC in ns, steps."""
    global idle
    byte, idle = NOTHING, False
    while not ended and (byte := asked()) == NOTHING:
        step()
        done += 1
        if log:
            log.write(f"{time.monotonic_ns()} {done}\n")
            log.flush()
    idle = True
    return done, byte


def run(step: Callable[[], None], log: TextIO | None, name: str) -> None:
    """Works and pauses by its commands."""
    done = 0
    byte = NOTHING
    while not ended and byte not in (b"", b"q"):
        byte = os.read(0, 1)
        if byte != b"g":
            continue
        before, begun = done, time.monotonic()
        done, byte = work(step, log, done)
        spent = time.monotonic() - begun
        summary = {"program": "offline_torch", "work": name, "steps": done - before, "elapsed_seconds": spent}
        print(json.dumps(summary), flush=True)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("work", choices=["train", "long"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=6, help="train: of the transformer")
    parser.add_argument("--width", type=int, default=1024, help="train: of the transformer")
    parser.add_argument("--batch", type=int, default=8, help="train")
    parser.add_argument("--length", type=int, default=256, help="train: of a sequence")
    parser.add_argument("--kernel-ms", type=float, default=7.0, help="long: of each product; 0: as --size has it")
    parser.add_argument(
        "--size", type=int, default=8192, help="long: of the matrices, or of those that are tried first"
    )
    parser.add_argument("--depth", type=int, default=24, help="long: products in each step")
    parser.add_argument(
        "--log", type=Path, help="a line per step, once it is done: CLOCK_MONOTONIC in ns, steps so far"
    )
    parser.add_argument("--facts", type=Path, help="JSON of what runs, written before `ready`")
    return parser.parse_args()


def main() -> None:
    """Works to the end of standard input."""
    global torch
    options = parsed()
    torch = importlib.import_module("torch")
    signal.signal(signal.SIGTERM, end)
    torch.manual_seed(2)
    found: dict[str, Any] = {"work": options.work, "torch": torch.__version__}
    step = {"train": train, "long": long}[options.work](options, found)
    found["step_kernel_seconds"] = kernel_seconds(step, options)
    if options.facts:
        options.facts.write_text(json.dumps(found) + "\n")
    log = options.log.open("w") if options.log else None
    print("ready", flush=True)
    run(step, log, options.work)


if __name__ == "__main__":
    main()
