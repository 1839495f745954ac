# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Words that name no process, writer or state of this field stay out of code, messages and documentation."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PLACES: Final = ("agent", "bpf", "enforce", "fleet", "gpuwarden", "docs", "packaging", "README.md", "CONTRIBUTING.md")
WORDS: Final = re.compile(
    r"\b(amiss|anybody|doer|heed|in vain|lest|mishap|nobody|roster|somebody|standing by|toolbox|whoever)\b",
    re.IGNORECASE,
)
USER: Final = re.compile(r"user:? `?nobody\b|[\"']nobody[\"']")  # the account


def found(text: str) -> list[str]:
    """The words in a line, but for the account."""
    return WORDS.findall(USER.sub("", text))


def lines() -> Iterator[tuple[str, str]]:
    """Where, and what: of every text file of these places."""
    listed = subprocess.run(["git", "ls-files", "-z", *PLACES], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.suffix not in (".svg", ".png", ".gz"):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from ((f"{name}:{number}", line) for number, line in enumerate(text.splitlines(), 1))


def test_these_words_are_not_used() -> None:
    assert not [(where, words) for where, line in lines() if (words := found(line))]


def test_they_are_found_but_for_the_account() -> None:
    assert found("whoever waits here wakes nobody") == ["whoever", "nobody"]
    assert found('runs as user nobody, or User: "nobody"') == []
