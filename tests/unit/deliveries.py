# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Deliveries with only those fields that a test is about."""

from __future__ import annotations

from agent.model import ProcessId
from agent.samples import Delivered

A = ProcessId(10, 1)


def delivery(*functions: tuple[int, int], **values: int) -> Delivered:
    fields = dict.fromkeys(
        (
            "at_ns",
            "launches",
            "charged_ns",
            "queued_ns",
            "waited_ns",
            "waited_busy_ns",
            "elapsed_ns",
            "elapsed_busy_ns",
            "pauses",
        ),
        0,
    )
    return Delivered(process=A, functions=functions, **{**fields, **values})
