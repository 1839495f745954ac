# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every generated file: the dashboards as Grafana reads them, and the rules as the Prometheus operator does."""

from __future__ import annotations

from pathlib import Path

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.container import CONTAINER
from dashboards.fleet import FLEET
from dashboards.node import NODE
from dashboards.placement import PLACEMENT
from dashboards.slo import SLO

FOLDER = Path(__file__).parent
PAGES = (FLEET, NODE, CONTAINER, SLO, PLACEMENT)
RULES = ("recording", "alerts")
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# Generated from dashboards/rules by `make dashboards`; do not edit.
"""


def files() -> dict[str, str]:
    """Path below dashboards/ → text."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    pages = {f"grafana/{page.uid}.json": encoder.encode(page.build()) + "\n" for page in PAGES}
    return {**pages, "kubernetes/rules.yaml": prometheus_rule()}


def prometheus_rule() -> str:
    """The rule files in one object for the Prometheus operator."""
    groups = [
        group for name in RULES for group in yaml.safe_load((FOLDER / f"rules/{name}.yaml").read_text())["groups"]
    ]
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gpuwarden", "labels": {"app.kubernetes.io/name": "gpuwarden"}},
        "spec": {"groups": groups},
    }
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=200)
