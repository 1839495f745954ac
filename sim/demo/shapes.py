# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the demo runs: an online service like BERT inference, and training-like offline work."""

from __future__ import annotations

RATE_PER_SECOND = 125  # × 4 ms of GPU time: half of the device
ONLINE = (
    "--rate",
    str(RATE_PER_SECOND),
    "--kernels",
    "20",
    "--kernel-us",
    "200",
    "--blocks",
    "132",
    "--threads",
    "1024",
)
OFFLINE = ("--kernels", "120", "--kernel-us", "250", "--blocks", "132", "--threads", "1024")
OFFLINE_PACE = ("--host-us", "3000", "--copy-bytes", "16MiB", "--memory", "12GiB")

POLICY = """\
version: 1
enforce: {enforce}
online:
  - name: chat
    match: {{container: chat}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 6ms, window: 10s}}
offline:
  - name: training
    match: {{container: training}}
    law: headroom
    ladder: [gate, pace]
"""
