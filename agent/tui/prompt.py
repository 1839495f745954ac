# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The line in which the word to filter by or to search for is typed."""

from __future__ import annotations

from textual.widgets import Input


class Prompt(Input):
    """There only while it is open. `what`: what the word is for."""

    DEFAULT_CSS = "Prompt { display: none; height: 1; border: none; padding: 0; } Prompt.open { display: block; }"

    def __init__(self) -> None:
        super().__init__(compact=True, select_on_focus=False)
        self.what = ""
        self.cursor_blink = False

    @property
    def is_open(self) -> bool:
        """Whether it has the keys."""
        return bool(self.what)

    def open(self, what: str, word: str) -> None:
        """Takes the keys."""
        self.what, self.placeholder = what, f"{what}: a word, Enter keeps it, Esc takes it back"
        self.value = word
        self.cursor_position = len(word)
        self.add_class("open")
        self.focus()

    def close(self) -> None:
        """Gives the keys back."""
        self.what = ""
        self.remove_class("open")
