# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""conformance/programs/torch_steps.py without PyTorch: what it makes of a trace, and how it talks."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.programs import torch_steps

# As Kineto writes them (PyTorch 2.11), shortened.
KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "nvjet_tst_256x128",
    "ts": 5000.5,
    "dur": 200.0,
    "args": {"device": 0, "stream": 7, "grid": [66, 2, 1], "block": [384, 1, 1]},
}
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "args": {"name": "python3"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 4900.0, "dur": 5.0},
    KERNEL,
    {**KERNEL, "ts": 5100.5, "dur": 300.0, "args": {"grid": [33, 1, 1]}},
    {**KERNEL, "ts": 9000.0, "dur": 50.0, "args": {}},
    {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy HtoD (Pinned -> Device)",
        "ts": 1.0,
        "dur": 9.0,
        "args": {"bytes": 64},
    },
    {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy DtoH (Device -> Pageable)",
        "ts": 2.0,
        "dur": 9.0,
        "args": {"bytes": 4},
    },
    {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy DtoD (Device -> Device)",
        "ts": 2.0,
        "dur": 9.0,
        "args": {"bytes": 99},
    },
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 3.0, "dur": 1.0, "args": {"bytes": 4}},
]


def test_a_trace_is_summed_up() -> None:
    sums = torch_steps.totals(EVENTS, 132)
    assert sums["kernels"] == 3
    assert sums["kernel_seconds"] == pytest.approx(550e-6)
    assert sums["busy_seconds"] == pytest.approx(450e-6), "where two overlap, the time counts once"
    assert sums["sm_seconds"] == pytest.approx((200 + 300 / 4 + 50) * 1e-6), "a small grid is not the whole device"
    assert sums["to_device_bytes"] == 64
    assert sums["from_device_bytes"] == 4


def test_intervals_that_touch_overlap_or_hold_others_count_once() -> None:
    assert torch_steps.union([]) == 0
    assert torch_steps.union([(0, 10), (2, 3), (10, 12), (20, 21)]) == 13
    assert torch_steps.union([(5, 6), (0, 1)]) == 2


class Tensor:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class Profile:
    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"traceEvents": EVENTS}))


@contextmanager
def profile(**_: Any) -> Iterator[Profile]:
    yield Profile()


def pytorch(has_gpu: bool = True) -> Any:
    """As much of PyTorch as a step needs."""
    model = SimpleNamespace(parameters=list)
    return SimpleNamespace(
        __version__="2.11.0",
        bfloat16="bf16",
        nn=SimpleNamespace(
            Linear=lambda *_, **__: "linear",
            ReLU=lambda: "relu",
            Sequential=lambda *layers: SimpleNamespace(to=lambda *_: Model(layers)),
        ),
        optim=SimpleNamespace(SGD=lambda *_, **__: Tensor()),
        randn=lambda *_, **__: Tensor(),
        empty_like=lambda *_, **__: Tensor(),
        profiler=SimpleNamespace(profile=profile, ProfilerActivity=SimpleNamespace(CUDA="cuda")),
        model=model,
        cuda=SimpleNamespace(
            is_available=lambda: has_gpu,
            synchronize=lambda: None,
            memory_reserved=lambda: 2048,
            memory_allocated=lambda: 1024,
            get_device_properties=lambda _: SimpleNamespace(multi_processor_count=132),
        ),
    )


class Model:
    def __init__(self, layers: tuple[str, ...]) -> None:
        self.layers = layers

    def parameters(self) -> list[str]:
        return list(self.layers)

    def __call__(self, batch: Tensor) -> Tensor:
        return batch


Talk = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Everything that the program answers to these words."""

    def talk(words: str, torch: Any) -> list[dict[str, Any]]:
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(sys, "stdin", io.StringIO(words))
        monkeypatch.setattr(torch_steps, "PAUSE_SECONDS", 0)
        monkeypatch.setattr(torch_steps, "PROGRESS_NS", 1_000_000)
        torch_steps.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return talk


def test_it_opens_runs_and_profiles_on_demand(talk: Talk) -> None:
    answers = talk("open\nrun 0.01\nprofile 0.01\nend\nrun 9\n", pytorch())
    events = [one["event"] for one in answers]
    assert events[:3] == ["imported", "profiled", "opened"]
    assert events[-2:] == ["ran", "profiled"]
    assert set(events[3:-2]) == {"progress"}
    progress = [one for one in answers if one["event"] == "progress"]
    assert progress[0]["steps"] == 0
    assert progress[-1]["steps"] == answers[-2]["steps"] > 0
    assert progress[-1]["at_ns"] > progress[0]["at_ns"]
    assert answers[-1]["kernels"] == 3
    assert answers[-1]["steps"] > 0
    assert answers[-1]["reserved_bytes"] == 2048


def test_it_ends_when_its_input_is_closed(talk: Talk) -> None:
    assert [one["event"] for one in talk("", pytorch())] == ["imported"]


def test_it_does_not_ask_the_driver_before_the_command_to(talk: Talk) -> None:
    torch = pytorch(has_gpu=False)
    torch.cuda = None
    assert [one["event"] for one in talk("end\n", torch)] == ["imported"]
    assert [one["event"] for one in talk("open\nrun 1\n", pytorch(has_gpu=False))] == ["imported", "no GPU"]
