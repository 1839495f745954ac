# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The shapes of well-known models, as arguments of the workloads in sim/: what counts is how long kernels are, how many
SMs they fill, and what the host does in between. Chosen for a GPU of 132 SMs.

They were picked from some seventy plausible ones, and their host pauses moved twice after measurements, so that the
online queue stays stable beside each offline shape under every way of sharing and contention comes near a published
table (bench/calibration/__main__.py). So they make a fair opponent; that the table is met is no prediction.
"""

from __future__ import annotations

import shlex
from typing import Final

# 40 kernels of 75 µs = 3 ms. Each is one full wave of 50 µs blocks and a little more (20 of 132 SMs): the ragged end
# that inference kernels of small batches have, in which blocks of other processes get in.
BERT_LIKE: Final = shlex.split("--kernels 40 --kernel-us 50 --blocks 284 --threads 1024")

# Three eighths of the GPU's time when alone: 125 requests of 3 ms a second.
BERT_RATE: Final = shlex.split("--rate 125")

# Short kernels (125 to 375 µs) of about one wave (110 of 132 SMs), four at a time, and then the host has to catch up.
RESNET_LIKE: Final = shlex.split("--kernels 4 --kernel-us 250 --jitter 0.5 --blocks 110 --threads 1024 --host-us 300")

# One kernel of the 10 ms class (7 to 11 ms) that fills the GPU, and long pauses for the host's part of the step.
WHISPER_LIKE: Final = shlex.split(
    "--kernels 1 --kernel-us 9000 --jitter 0.2 --blocks 132 --threads 1024 --host-us 15000"
)
