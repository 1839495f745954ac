# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every target in Python, by name. The kernel's parser of HTTP is one in C: tests/fuzz/http_stream.c."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.fuzz.target import Target
from tests.fuzz.targets import configuration, enforcement, fleet, node, runtimes, web

TARGETS: Final[Mapping[str, Target]] = {
    **configuration.TARGETS,
    **runtimes.TARGETS,
    **node.TARGETS,
    **enforcement.TARGETS,
    **web.TARGETS,
    **fleet.TARGETS,
}
