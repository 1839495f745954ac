# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a plan may give away."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fleet.extender.reservations import GPU
from fleet.model import Slot
from fleet.plan import free_slots

SLOTS = tuple(Slot("n1", gpu, "H200", None, 0.0, math.inf, math.inf, 1 << 36, None) for gpu in ("GPU-1", "GPU-2"))


def pod(gpu: str | None, phase: str = "Pending") -> dict[str, Any]:
    annotations = {} if gpu is None else {GPU: gpu}
    metadata = {"uid": "u1", "name": "etl", "namespace": "batch", "annotations": annotations}
    return {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("document", "free"),
    [
        (pod("GPU-1"), ["GPU-2"]),  # bound, and its image is pulled: no agent sees it work
        (pod("GPU-1", "Running"), ["GPU-2"]),
        (pod("GPU-1", "Succeeded"), ["GPU-1", "GPU-2"]),
        (pod(None), ["GPU-1", "GPU-2"]),
        ("no pod", ["GPU-1", "GPU-2"]),
    ],
)
def test_a_gpu_that_a_pod_has_is_not_planned_again(document: Any, free: list[str]) -> None:
    assert [slot.gpu for slot in free_slots(SLOTS, [document])] == free
