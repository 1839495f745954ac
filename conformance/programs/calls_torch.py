# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""PyTorch, doing known things. `calls_torch.py` for all phases, `calls_torch.py memory` for those of the allocator.

The allocator is chosen with PYTORCH_CUDA_ALLOC_CONF. `NAME, profiled` is phase NAME as CUPTI sees it.
"""

from __future__ import annotations

import sys

import torch
from calls_protocol import Phase, own_stdout, serve

ROUNDS = 20
SEGMENTS, SEGMENT_BYTES = 16, 32 << 20  # each larger than what the caching allocator shares among tensors
COPIED = 1 << 20


def eager_phase() -> Phase:
    """A product of matrices, something small, and a convolution."""
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.float16) for _ in range(2))
    layer = torch.nn.Conv2d(16, 32, 3, padding=1).cuda().eval()
    images = torch.randn(8, 16, 64, 64, device="cuda")

    def phase() -> dict[str, int]:
        with torch.no_grad():
            for _ in range(ROUNDS):
                torch.relu(a @ b)
                layer(images)
        torch.cuda.synchronize()
        return {}  # how many kernels these are is the libraries' business: the profiler says

    return phase


def graph_phase() -> Phase:
    """A graph of a few kernels, launched again and again."""
    a = torch.randn(512, 512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is done only once must not happen in a capture
        for _ in range(3):
            torch.relu(a @ a + 1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = torch.relu(a @ a + 1)

    def phase() -> dict[str, int]:
        for _ in range(ROUNDS):
            graph.replay()
        torch.cuda.synchronize()
        return {"graph launches": ROUNDS} if result.shape == a.shape else {}

    return phase


def copying_phase() -> Phase:
    """Copies both ways and on the device, and each kind of wait."""
    pageable, pinned = torch.ones(COPIED), torch.ones(COPIED).pin_memory()
    there, other = torch.ones(COPIED, device="cuda"), torch.ones(COPIED, device="cuda")
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()

    def phase() -> dict[str, int]:
        for _ in range(ROUNDS):
            there.copy_(pageable)
            there.copy_(pinned, non_blocking=True)
            other.copy_(there)
            there.cpu()
            event.record(stream)
            event.synchronize()
            stream.synchronize()
            torch.cuda.synchronize()
        return {"copies": 4 * ROUNDS, "waits": 3 * ROUNDS}

    return phase


def memory_phase() -> Phase:
    """Tensors that no memory is left for, and their end."""

    def phase() -> dict[str, int]:
        torch.cuda.empty_cache()
        held = [torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device="cuda") for _ in range(SEGMENTS)]
        torch.cuda.synchronize()
        count = len(held)
        held.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return {"allocations": count, "frees": count}

    return phase


def profiled(phase: Phase) -> Phase:
    """A phase under the profiler: its counts, and what ran on the GPU."""

    def again() -> dict[str, int]:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            did = phase()
        names = [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]
        names = [name for name in names if "Sync" not in name]  # waits, where CUPTI is asked for them
        copies = sum(name.startswith("Memcpy") for name in names)
        memsets = sum(name.startswith("Memset") for name in names)
        return {**did, "launches": len(names) - copies - memsets, "copies": copies, "memsets": memsets}

    return again


def main() -> None:
    """Everything once, then what is asked for."""
    answers = own_stdout()
    torch.cuda.init()
    phases = {"memory": memory_phase()}
    if "memory" not in sys.argv[1:]:
        eager, copying = eager_phase(), copying_phase()
        phases = {"eager": eager, "graphs": graph_phase(), "copies": copying, **phases}
        phases |= {"eager, profiled": profiled(eager), "copies, profiled": profiled(copying)}
    for name, phase in phases.items():
        if not name.endswith("profiled"):  # CUPTI stays where it was once
            phase()
    about = {"version": torch.__version__, "allocator": torch.cuda.get_allocator_backend()}
    serve(answers, about, phases)


if __name__ == "__main__":
    main()
