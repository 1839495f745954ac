# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""bpf/http.h in ctypes: what the HTTP object's maps hold."""

from __future__ import annotations

import ctypes as c
from typing import Any

from agent.layout import U32, U64, Latency

WATCHES, LONGEST_PATH = 64, 64
TALLIES = (
    "answered",
    "elsewhere",
    "foreign",
    "unanswered",
    "unseen",
    "unreadable",
    "unframed",
    "long",
    "deep",
    "no_connection",
    "no_process",
)
LOSSES = TALLIES[3:]


class Watch(c.Structure):
    """What to look for in one container."""

    _fields_ = [
        ("epoch", U32),
        ("port", c.c_uint16),
        ("path_length", c.c_uint16),
        ("path", c.c_uint8 * LONGEST_PATH),
    ]

    @classmethod
    def of(cls, epoch: int, port: int, path: str) -> Watch:
        """`path`: how requests' targets have to begin; "" for all."""
        text = path.encode("utf-8", "surrogateescape")[:LONGEST_PATH]
        return cls(epoch, port, len(text), (c.c_uint8 * LONGEST_PATH)(*text))


class Process(c.Structure):
    """Key of `http_wanted`."""

    _fields_ = [("tgid", U32)]


class Follower(c.Structure):
    """A process whose calls are looked at."""

    _fields_ = [("watch", U32), ("epoch", U32)]


MIRRORS: dict[str, type[c.Structure]] = {"http_watch": Watch, "http_follower": Follower, "latency": Latency}
MAPS: dict[str, tuple[Any, Any]] = {
    "http_wanted": (Process, Follower),
    "http_watches": (U32, Watch),
    "http_latencies": (U32, Latency),
    "http_tallies": (U32, U64),
}
