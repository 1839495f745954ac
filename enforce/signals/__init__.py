# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The signals: service-level indicators, each a source of online latencies."""

from __future__ import annotations

from enforce.signals.http import Http
from enforce.signals.prometheus import Prometheus
from enforce.signals.registry import GpuWait
from enforce.signals.uprobe import Uprobe

BUILTIN = (GpuWait, Http, Prometheus, Uprobe)
