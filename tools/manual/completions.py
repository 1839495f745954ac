# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Completions for bash, zsh and fish, written by shtab; names of containers are asked of the running agent.

A container chooses its own name, and bash expands the words that it completes from: so names with anything in them but
letters, digits, dots, dashes and underscores are left out. And root may press Tab in anybody's folder: no module is
taken from there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import shtab

from tools.manual.arguments import commands, is_commands

_ASK: Final = """\
  python3 -I -c '
import json, os, re, socket
with socket.socket(socket.AF_UNIX) as agent:
    agent.settimeout(1)
    agent.connect("/run/gpuwarden/agent.sock" if os.geteuid() == 0 else "/run/gpuwarden/read.sock")
    agent.sendall(b"GET /v1/snapshot HTTP/1.0\\r\\n\\r\\n")
    snapshot = json.loads(agent.makefile("rb").read().partition(b"\\r\\n\\r\\n")[2])
names = {row["container"][key] or "" for row in snapshot["containers"] for key in ("name", "pod")}
print(*sorted(name for name in names if re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]*", name)), sep="\\n")
' 2>/dev/null"""
_CONTAINERS: Final = {
    "bash": "_gpuwarden_container",
    "zsh": "_gpuwarden_container",
    "fish": "(__gpuwarden_containers)",
    "preamble": {
        "bash": f"_gpuwarden_containers() {{\n{_ASK}\n}}\n"
        '_gpuwarden_container() {\n  compgen -W "$(_gpuwarden_containers)" -- "$1"\n}\n',
        "zsh": f"_gpuwarden_containers() {{\n{_ASK}\n}}\n"
        '_gpuwarden_container() {\n  compadd -- ${(f)"$(_gpuwarden_containers)"}\n}\n',
        "fish": f"function __gpuwarden_containers\n{_ASK}\nend\n",
    },
}
_NAMES: Final = {"bash": "{}", "zsh": "_{}", "fish": "{}.fish"}  # as each shell looks for them


def scripts(*parsers: argparse.ArgumentParser) -> dict[str, str]:
    """SHELL/FILE → what is in it."""
    for parser in parsers:
        _tell(parser)
    return {
        f"{shell}/{name.format(parser.prog)}": shtab.complete(parser, shell=shell)
        for shell, name in _NAMES.items()
        for parser in parsers
    }


def _tell(parser: argparse.ArgumentParser) -> None:
    """Adds what argparse does not know: which values are files, folders and containers."""
    for command in commands(parser):
        for action in (*command.options, *command.positionals):
            kind = None if action.nargs == 0 or action.choices or is_commands(action) else _kind(action)
            if kind is not None:
                action.complete = kind  # type: ignore[attr-defined]


def _kind(action: argparse.Action) -> object:
    if action.dest == "container":
        return _CONTAINERS
    if action.dest.endswith("_dir"):
        return shtab.DIRECTORY
    return shtab.FILE if action.type is Path or action.metavar == "FILE" else None
