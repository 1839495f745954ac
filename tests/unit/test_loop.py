# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The deciding loop, as whoever asks whether the agent lives sees it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from agent.pipeline import Pipeline
from enforce.loop import Loop


def test_when_a_decision_began_is_known_while_decisions_are_made_and_not_while_all_is_released() -> None:
    pipeline = Pipeline([], cast(Any, None), None)
    begun: list[int | None] = []
    while_released: list[int | None] = []
    ending = threading.Event()

    class Noting(Loop):
        def step(self) -> None:
            super().step()
            begun.append(pipeline.decided_ns)
            if len(begun) == 3:
                ending.set()

    other: dict[str, Any] = dict.fromkeys(
        ("members", "signals", "requests", "deliveries", "hands", "tools", "explainer", "meter", "gates", "health")
    )
    release = SimpleNamespace(
        **dict.fromkeys(("release", "let_go"), lambda: while_released.append(pipeline.decided_ns))
    )
    tuning = SimpleNamespace(decide_interval_ns=1_000_000)
    policy, parts = cast(Any, SimpleNamespace(tuning=tuning)), cast(Any, release)
    loop = Noting(policy=policy, pipeline=pipeline, climber=parts, memory=parts, **other)
    loop.run(ending)
    assert loop.failures == 0
    assert begun == sorted(set(begun), key=lambda ns: ns or 0), "each later than the one before"
    assert None not in begun
    assert set(while_released) == {None}
