# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Decide and act: keep the online containers' latency by slowing the offline ones."""
