# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the keys do, in the words of the help page and of the foot: nvitop's and htop's where they have one."""

from __future__ import annotations

from typing import Final

from rich.text import Text

FOOT: Final = (
    ("h", "help"),
    ("q", "quit"),
    ("123", "view"),
    ("t", "tree"),
    (",./", "sort"),
    ("\\", "filter"),
    ("F3", "search"),
    ("p", "pause"),
    ("Enter", "open"),
    ("c", "columns"),
)
REPLAY: Final = (*FOOT[:2], ("Space", "play"), ("Left/Right", "seek"), ("Home/End", "ends"), *FOOT[2:7])
PAGE: Final = (("Esc", "back"), ("q", "quit"), ("Up/Down", "scroll"))
HELP_PAGE: Final = (("Esc", "back"), ("Up/Down", "scroll"))
HELP: Final = (
    ("1 2 3", "containers, processes, GPUs"),
    ("t", "tree: container, its processes, their kernels"),
    (", .", "sort by the column to the left, to the right"),
    ("/", "reverse the order"),
    ("\\", "filter: only lines with a word; Esc shows all"),
    ("F3", "search: go to a line with a word; F3 or n: next"),
    ("c F2", "choose the columns"),
    ("Enter", "open the container of a line; Esc goes back"),
    ("p Space", "pause the display; recording goes on"),
    ("Up Down PgUp PgDn Home End", "move"),
    ("h ? F1", "this page"),
    ("q F10 Ctrl-C", "quit"),
    ("In a replay:", ""),
    ("p Space", "stand still, or play"),
    ("Left Right Home End", "a tick back, a tick on, the first, the last"),
)
ABOUT: Final = (
    "SM, power: green below 10 %, yellow below 75 %, then red. Memory: 10, 80 %.",
    "A PCIe bar is full at the most of the last minute: NVML tells no bound.",
    "~ estimated. SLACK: what is left of the target; below 0 it is missed.",
    "STATE: free, paced, paused for a part of the time, frozen, locked, swapped.",
)


def foot(keys: tuple[tuple[str, str], ...], width: int) -> Text:
    """As many as fit."""
    line = Text(no_wrap=True)
    for key, word in keys:
        if line.cell_len + len(key) + len(word) + 3 > width:
            break
        line.append(f" {key}", "bold").append(f" {word} ", "dim")
    return line


def help_page() -> list[Text]:
    """Everything."""
    lines = [Text.assemble((f"{key:<28}", "bold"), word) for key, word in HELP]
    return [*lines, Text(), *map(Text, ABOUT)]
