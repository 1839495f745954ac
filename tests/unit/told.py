# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Decisions about one offline container that is held for one online container."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from enforce.decisions import Decision
from enforce.explain.model import Who

NS = 1_000_000_000
OFFSET = 1_800_000_000 * NS
TRAIN = Who("docker:aaaa1111", "train", "train-0", "batch", "aaaa1111", "offline", "training")
CHAT = Who("docker:cccc2222", "server", "chat-0", "serving", "cccc2222", "online", "chat")
BASE = Decision(
    wall_ns=OFFSET,
    container=TRAIN.key,
    device="GPU-1",
    rule="training",
    law="headroom",
    latency_ns=40_000_000.0,
    samples=120,
    quantile=0.99,
    target_ns=50_000_000,
    slack_ratio=0.2,
    share_before=1.0,
    share_after=1.0,
    max_queued_ns=2_000_000,
    reason="slack 20%: waiting to grow",
    acted=True,
    name=TRAIN.name,
    pod=TRAIN.pod,
    namespace=TRAIN.namespace,
    ruler=CHAT.key,
    ruler_name=CHAT.name,
    rungs=("gate", "pace"),
)


def at(seconds: float, **changed: Any) -> Decision:
    return replace(BASE, wall_ns=OFFSET + int(seconds * NS), **changed)
