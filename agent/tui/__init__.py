# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The snapshot's face for people: gputop."""

from agent.tui.listing import View
from agent.tui.screen import Screen, render

__all__ = ["Screen", "View", "render"]
