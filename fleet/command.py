# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet COMMAND`: the parser, and dispatch to one module per command.

A command's module has `add_arguments(parser)` and `act(options) -> exit code`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence
from typing import Final

from fleet.model import FleetError

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "plan": ("fleet.plan", "which waiting job would go where now, and what that is worth; acts on nothing"),
    "analyse": ("fleet.analyse.command", "print what a trace says: sizes, queueing, locality, status, load"),
    "formats": (
        "fleet.traces.command",
        "list the formats of traces, where data are, their licences, how to fetch them",
    ),
    "split": ("fleet.pipeline.command", "split a pipeline's SLO over its stages, for a policy or for pods"),
    "simulate": ("fleet.simulate", "what each policy would have made of a trace: completion times, queueing, use"),
    "serve": ("fleet.service", "places waiting pods by the plan, as an extender of a kube-scheduler beside it"),
    "explain": ("fleet.explain", "why a pod is where it is, or why it waits, as the running service knows it"),
}
"""Name → module, what it is for"""


def add_commands(parser: argparse.ArgumentParser, whole: Collection[str]) -> None:
    """All of them, with the options of those in `whole`, of the others only names and help."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="fleet_command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in whole:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(act=loaded.act)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 success, 2 wrong input, 3 something is missing."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="gpuwarden fleet",
        description="Decides which offline job runs beside which online service, and shows what that is worth.",
    )
    try:
        add_commands(parser, [word for word in given if word in COMMANDS][:1])
        options = parser.parse_args(given)
        code: int = options.act(options)
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "fleet":
            raise
        remedy = "`pip install 'gpuwarden[fleet]'`, or `make setup` in a checkout"
        print(f"gpuwarden fleet: {error.name} is missing: {remedy}", file=sys.stderr)
        return 3
    except FleetError as error:
        print(f"gpuwarden fleet: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
