# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Hostile programs beside an online service: what is seen of each, what contains it, and what it costs the service."""
