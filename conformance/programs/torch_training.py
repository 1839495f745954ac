# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python torch_training.py SECONDS`: the same short training twice with PyTorch, to be disturbed the second time.

Prints `{"ready": true, "steps": N}` when the first, undisturbed one is over, trains the same again from the same seed,
and prints `{"same": …, "steps_ns": […], "seconds": [first, second]}`: whether all weights came out the same to the last
bit, and when each step of the second one had ended (CLOCK_MONOTONIC). Needs nothing but PyTorch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products may differ from run to run

WARM_SECONDS = 0.5
_WIDTH, _BATCH, _SEED = 2048, 512, 7


def trained(torch: Any, seconds: float, steps: int) -> tuple[Any, list[int], float]:
    """The weights, when each step had ended, and how long it took. `steps` of 0: for so many seconds."""
    torch.manual_seed(_SEED)
    layers = [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 10)]
    model = torch.nn.Sequential(*layers).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(_BATCH, _WIDTH).cuda(), torch.randint(0, 10, (_BATCH,)).cuda()
    times: list[int] = []
    begun = time.monotonic()
    while len(times) < steps or (not steps and time.monotonic() - begun < seconds):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
        torch.cuda.synchronize()
        times.append(time.monotonic_ns())
    taken = time.monotonic() - begun
    return [parameter.detach().cpu() for parameter in model.parameters()], times, taken


def main() -> int:
    """Trains, waits for no command."""
    torch: Any = importlib.import_module("torch")

    torch.use_deterministic_algorithms(True)
    trained(torch, WARM_SECONDS, 0)  # libraries are loaded and clocks are up
    expected, times, first = trained(torch, float(sys.argv[1]), 0)
    print(json.dumps({"ready": True, "steps": len(times)}), flush=True)
    found, times, second = trained(torch, 0.0, len(times))
    same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    print(json.dumps({"same": same, "steps_ns": times, "seconds": [first, second]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
