# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The signals: where an online latency comes from."""

from enforce.signals.gpu_wait import GpuWait
from enforce.signals.http import Http

BUILTIN = (GpuWait, Http)
