# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a parser understands. argparse tells it in private attributes only; they are read here and nowhere else."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or one of its commands. `help`: the line in its parent's list."""

    path: tuple[str, ...]
    help: str
    parser: argparse.ArgumentParser

    @property
    def options(self) -> list[argparse.Action]:
        """Its options, without -h and hidden ones."""
        return [action for action in _shown(self.parser) if action.option_strings]

    @property
    def positionals(self) -> list[argparse.Action]:
        """Its positional arguments, without the names of commands."""
        return [action for action in _shown(self.parser) if not action.option_strings and not is_commands(action)]


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), text: str = "") -> Iterator[Command]:
    """The parser itself, and every command below it."""
    yield Command(path, text, parser)
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            for name, below in action.choices.items():
                yield from commands(below, (*path, name), helps.get(name, ""))


def is_commands(action: argparse.Action) -> bool:
    """Whether it takes the name of a command."""
    return isinstance(action, argparse._SubParsersAction)  # noqa: SLF001


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """An option's help, with its default filled in."""
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def value_of(action: argparse.Action) -> str:
    """How its value is called; "" for a flag."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001
        if action.help != argparse.SUPPRESS and "-h" not in action.option_strings:
            yield action
