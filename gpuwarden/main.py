# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden` and `gputop`: the parsers, and dispatch to one module per command.

A command's module has `add_arguments(parser)` and `act(options) -> exit code`. Only the module of the command that was
given is imported, so that `--help` and small commands start fast.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from typing import NoReturn

from agent.core import logs
from agent.core.errors import SetupError, WardenError, exit_codes

COMMANDS = {  # name: what it is for; its module is gpuwarden.NAME, but for those that another package provides
    "run": "run the agent: observe, serve metrics, and enforce the policy",
    "plan": "show what the policy would do now, without doing it",
    "explain": "show when, why, how much and for which container another one was slowed",
    "report": "show GPU use by container, namespace or device, from the hourly usage ledger",
    "check": "validate a policy or a web configuration; list every mistake and warning",
    "policy": "write a first policy from the running containers, or print the JSON Schema",
    "reload": "make the running agent reload its policy, and print the outcome",
    "release": "undo whatever a crashed agent left in force",
    "doctor": "check what works on this machine, what does not, and what to do about it",
    "stacks": "sample which code of a container launches kernels or allocates memory",
    "fleet": "decide which offline job runs beside which online service; simulate and analyse traces",
    "demo": "show enforcement on a simulated GPU, in under three minutes",
}
_MODULES = {"policy": "gpuwarden.policy_init.command"}
_ELSEWHERE = {  # name: what to do where it is missing; found by this group of entry points, it reads its own options
    "fleet": "nodes have no fleet commands: run `make setup` in a checkout, or `pip install 'gpuwarden[fleet]'`",
    "demo": "the demo needs the simulated GPU: run `make demo` in a checkout, or install gpuwarden-sim",
}
_ENTRY_POINTS = "gpuwarden.commands"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`gpuwarden`."""
    logs.open_standard_streams()
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser([word for word in given if word in COMMANDS][:1])
    options, rest = parser.parse_known_args(given)
    if rest and options.command not in _ELSEWHERE:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    logs.configure(logs.Format(options.log_format), logging.DEBUG if options.verbose else logging.INFO)
    _exit_with(parser.prog, lambda: options.act(options))


def gputop(arguments: Sequence[str] | None = None) -> NoReturn:
    """`gputop`."""
    logs.open_standard_streams()
    parser = _top_parser()
    options = parser.parse_args(arguments)
    logs.plain(parser.prog, logging.ERROR)
    _exit_with(parser.prog, lambda: options.act(options))


def parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The complete parsers of gpuwarden and gputop: man pages and completions are made from them."""
    return _parser(COMMANDS), _top_parser()


def _exit_with(program: str, act: Callable[[], int]) -> NoReturn:
    try:
        code = act()
    except WardenError as error:
        logs.say(f"{program}: {error}", logging.ERROR)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def _parser(whole: Sequence[str] | dict[str, str]) -> argparse.ArgumentParser:
    """The parser of gpuwarden: with the options of the commands in `whole`, of the others only names and help."""
    parser = argparse.ArgumentParser(
        prog="gpuwarden",
        description="Shows which container uses how much of each GPU, and slows offline containers to keep the latency "
        "SLOs of online ones.",
        epilog=exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(log_format=logs.Format.AUTO)
    parser.add_argument("--version", action="version", version=f"gpuwarden {version('gpuwarden')}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level DEBUG")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, add_help=name not in _ELSEWHERE)
        if name in _ELSEWHERE:
            command.set_defaults(act=_elsewhere)
        elif name in whole:
            module = importlib.import_module(_MODULES.get(name, f"gpuwarden.{name}"))
            module.add_arguments(command)
            command.set_defaults(act=module.act)
    return parser


def _elsewhere(options: argparse.Namespace) -> int:
    try:
        (found,) = entry_points(group=_ENTRY_POINTS, name=options.command)
        command: Callable[[Sequence[str]], int] = found.load()
    except (ValueError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name not in ("fleet", "sim", "sim.demo", "tools"):
            raise  # it is there, and lacks something itself
        raise SetupError(_ELSEWHERE[options.command]) from error
    return command(options.rest)


def _top_parser() -> argparse.ArgumentParser:
    from gpuwarden import top

    parser = argparse.ArgumentParser(
        prog="gputop",
        description="Shows GPU use by container, process or device. Live on a terminal, where h lists the keys.",
        epilog=exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_arguments(parser)
    parser.set_defaults(act=top.act)
    return parser
