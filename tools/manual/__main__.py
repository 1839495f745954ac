# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m manual`: writes packaging/man and packaging/completions."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleet import command as fleet
from gpuwarden.main import parsers
from sim.demo import add_arguments
from tools.manual.arguments import commands
from tools.manual.completions import scripts
from tools.manual.pages import pages

PACKAGING = Path(__file__).resolve().parents[2] / "packaging"


def described() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The product's parsers, with the options of the demo and the fleet, which the product hands on unread."""
    warden, top = parsers()
    elsewhere = {command.path: command.parser for command in commands(warden)}
    add_arguments(elsewhere["demo",])
    fleet.add_commands(elsewhere["fleet",], fleet.COMMANDS)
    return warden, top


def files() -> dict[Path, str]:
    """Every generated file, and its content."""
    warden, top = described()
    return {
        **{PACKAGING / "man" / name: text for name, text in pages(warden, top).items()},
        **{PACKAGING / "completions" / name: text for name, text in scripts(warden, top).items()},
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
