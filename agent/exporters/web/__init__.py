# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Access control of what the agent serves over TCP: TLS, client certificates, passwords, headers.

The file is the web configuration of the Prometheus exporter-toolkit, which node_exporter and most others read:
https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. Invariant: each of its keys is
either applied as documented there or refused with a reason; none is ignored.
"""
