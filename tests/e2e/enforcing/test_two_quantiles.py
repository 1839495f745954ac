# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An SLO whose p99 has all the room there is and whose p50 has none: p50 binds, and every output says so."""

from __future__ import annotations

import json
from typing import Any

from agent.core.model import EnforcementStatus
from tests.e2e.node import Agent, Node
from tests.e2e.workloads import Busy
from tools.harness.wait import until


def decisions(agent: Agent, after: int) -> list[dict[str, Any]]:
    """Those with a latency."""
    found = map(json.loads, agent.decisions.read_bytes()[after:].split(b"\n")[:-1])
    return [line for line in found if line["kind"] == "decision" and line["latency_ns"] is not None]


def test_the_quantile_that_is_missed_binds_though_the_other_one_is_kept(node: Node, warden: Agent, busy: Busy) -> None:
    """Each request takes 200 ms of kernels."""
    slo = "target: 10m, window: 10s, also: {quantile: 50%, target: 1ms}"
    policy = node.policy(enforce=True, max_pause="100ms").replace("target: 400ms, window: 10s", slo)
    before = warden.decisions.stat().st_size
    assert "policy reloaded" in warden.reload(policy)
    until(lambda: any("missed" in line["reason"] for line in decisions(warden, before)), "an answer to the miss")
    missed = [line for line in decisions(warden, before) if "missed" in line["reason"]]
    for line in missed:
        assert (line["quantile"], line["target_ns"]) == (0.5, 1_000_000)
        assert line["slack_ratio"] < 0
        assert (line["other"]["quantile"], line["other"]["target_ns"]) == (0.99, 600 * 10**9)
        assert line["other"]["slack_ratio"] > 0.9
    asked = node.run("explain", node.name("training-0"), "--since", "1m", "--run-dir", str(warden.run_dir))
    assert "p50 within 1 ms" in " ".join(asked.stdout.split()), asked
    online = node.run("explain", node.name("chat"), "--since", "1m", "--run-dir", str(warden.run_dir))
    assert "promised 600000 ms" in " ".join(online.stdout.split()), online
    assert "promised 1 ms" in " ".join(online.stdout.split()), online

    def with_latency() -> EnforcementStatus | None:
        stance = warden.stance(node.name("chat"))
        return stance if stance and stance.slack_ratio is not None else None

    stance = until(with_latency, "requests in the window")
    assert (stance.latency_quantile, stance.also_quantile, stance.also_target_seconds) == (0.99, 0.5, 0.001)
    assert (stance.slack_ratio or 0) < 0
    assert "gpuwarden_container_slo_also_quantile_ratio{" in warden.metrics()
    warden.reload(node.policy(enforce=False))
