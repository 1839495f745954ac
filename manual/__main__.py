# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m manual`: writes packaging/man and packaging/completions."""

from __future__ import annotations

from pathlib import Path

from agent.main import parsers
from manual.completions import scripts
from manual.pages import pages

PACKAGING = Path(__file__).resolve().parent.parent / "packaging"


def files() -> dict[Path, str]:
    """Every generated file, and what is to be in it."""
    warden, top = parsers()
    return {
        **{PACKAGING / "man" / name: text for name, text in pages(warden, top).items()},
        **{PACKAGING / "completions" / name: text for name, text in scripts(warden, top).items()},
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
