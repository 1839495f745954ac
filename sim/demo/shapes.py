# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the demo runs: an online service like BERT inference, and training-like offline work."""

from __future__ import annotations

from pathlib import Path

from tools.harness.workloads import BERT_LIKE, BERT_RATE, RESNET_LIKE

ONLINE = (*BERT_RATE, *BERT_LIKE)
OFFLINE = RESNET_LIKE
OFFLINE_PACE = ("--copy-bytes", "2MiB", "--memory", "12GiB")

TARGET_RATIO = 1.25  # of the p99 that the agent reads while the online service is alone
POLICY = """\
version: 1
enforce: {enforce}
online:
  - name: chat
    match: {{container: chat}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: {target_us}us, window: 10s}}
offline:
  - name: training
    match: {{container: training}}
    law: headroom
    ladder: [gate, pace]
"""


def write_policy(path: Path, target_seconds: float, *, enforce: bool) -> None:
    """The demo's policy, with permissions that the agent accepts."""
    target_us = round(target_seconds * 1e6)
    path.write_text(POLICY.format(enforce="true" if enforce else "false", target_us=target_us))
    path.chmod(0o600)
