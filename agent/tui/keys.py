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
HELP: Final = (
    ("1  2  3", "containers, processes, GPUs"),
    ("t", "tree: container, its processes, their kernels"),
    (",  .", "sort by the column to the left, to the right"),
    ("/", "reverse the order"),
    ("\\", "show only what contains a word; Esc shows everything again"),
    ("F3", "search: to the next line that contains a word; F3 again, or n, for the one after it"),
    ("c  F2", "choose the columns"),
    ("Enter", "open the container of a line; Esc goes back"),
    ("p  Space", "pause the display; watching and recording go on"),
    ("Up  Down  PgUp  PgDn  Home  End", "move"),
    ("h  ?  F1", "this page"),
    ("q  F10  Ctrl-C", "quit"),
    ("", ""),
    ("In a replay", ""),
    ("Space  p", "play, or stand still"),
    ("Left  Right", "a tick back, a tick on"),
    ("Home  End", "the first tick, the last one"),
)
ABOUT: Final = (
    "SM and power are green below 10 %, yellow below 75 %, red from there on; memory: 10 % and 80 %.",
    "A PCIe bar is full at the most that was seen in the last minute: NVML tells no bound.",
    "~ is before what was estimated; a dash is what is not known.",
    "SLACK is what is left of the target: below 0 it is missed.",
    "STATE of an offline container: free, paced, paused for a part of the time, frozen, locked, swapped, evicted.",
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
    lines = [Text("gputop", style="bold"), Text()]
    lines += [Text.assemble((f"  {key:<33}", "bold"), word) for key, word in HELP]
    return [*lines, Text(), *(Text(f"  {sentence}") for sentence in ABOUT)]
