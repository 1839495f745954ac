# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Dashboards for Grafana, made of typed objects, and the rules for Prometheus beside them. Not part of the product."""
