# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the styles look like that cells are written with.

Cells name the colours that hands know from nvitop: green, yellow, red. Drawn are those that people with any kind of
colour blindness tell apart (after Okabe and Ito), in one set for dark terminals and one for light ones. Nothing is said
by a colour alone: a figure, a sign or a word is always beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.theme import Theme

DARK: Final = {"green": "#1fb28a", "yellow": "#f0e442", "red": "#ee6c2b", "cyan": "#56b4e9", "magenta": "#dd8fbb"}
LIGHT: Final = {"green": "#00735a", "yellow": "#8f6400", "red": "#b33c00", "cyan": "#005f99", "magenta": "#8f3d6d"}
CURSOR_DARK: Final = "#2a3b47"  # behind the line of the cursor
CURSOR_LIGHT: Final = "#d5e3ec"
_LIGHT_BACKGROUNDS: Final = ("7", "15")


def theme(light: bool) -> Theme:
    """For a rich console: each colour by its name, alone and in bold."""
    colours = LIGHT if light else DARK
    return Theme({**colours, **{f"bold {name}": f"bold {colour}" for name, colour in colours.items()}})


def is_light(environment: Mapping[str, str]) -> bool:
    """Whether the terminal says that its background is light, as some do in COLORFGBG."""
    return environment.get("COLORFGBG", "").rpartition(";")[2] in _LIGHT_BACKGROUNDS
