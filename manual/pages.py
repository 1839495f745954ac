# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gpuwarden(8) and gputop(1). Commands and options are the parsers' own; what parsers do not know is said here.

argparse-manpage was tried: it puts the day into each page, and cannot say what a file, a signal or an exit code means.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Final

from agent import endpoint
from agent.errors import NvmlError, PolicyError, ProbeError, SetupError, WardenError
from agent.main import DEFAULT_POLICY, DEFAULT_RUN_DIR
from agent.usage.tables import DEFAULT_FILE
from manual import roff
from manual.arguments import Command, commands, help_of, value_of

DATE: Final = "2026-11-22"  # of the texts below: a page must not change with the day on which it is made
_WARDEN_DOES: Final = "show who uses a shared GPU, and keep the latency promises of online containers"
_TOP_DOES: Final = "show who uses which GPU, by container, process or device"
_WARDEN: Final = (
    "A node agent for shared NVIDIA GPUs. It shows which container uses how much of a GPU, by probes on the driver's "
    "library and by NVML, and keeps the latency promises of online containers by slowing the offline ones, as a policy "
    "says. Containers are not changed: nothing is loaded into them, and nothing of theirs is patched.",
    "It needs root and Linux 5.15 or later with BTF. When it ends, however it ends, everything that it slowed runs on.",
)
_TOP: Final = (
    "Asks the running agent and shows its figures: devices, and containers, processes or GPUs. Where no agent runs it "
    "watches by itself, which needs root and ends with it.",
    "Figures with a ~ are estimated. A dash is unknown, or of no meaning there; it is never zero. What no known "
    "container has caused is shown as (unattributed).",
)
_SIGNALS: Final = (
    ("SIGHUP", "gpuwarden run reads the policy again. One that is wrong is refused, and the old one stays in force."),
    ("SIGTERM, SIGINT", "It releases everything and ends."),
    ("SIGUSR1", "It writes to standard error where each of its threads is."),
)
EXIT: Final = (
    (0, "done"),
    (WardenError.exit_code, "failed, or not all of it could be done: the message says what is left to do"),
    (PolicyError.exit_code, "the command line or the policy is wrong"),
    (SetupError.exit_code, "this machine lacks something: root, a kernel feature, a library, a GPU, a running agent"),
    (ProbeError.exit_code, "a BPF program or a probe could not be loaded or attached"),
    (NvmlError.exit_code, "NVML cannot be used"),
    (129, "gputop lost its terminal (SIGHUP)"),
    (130, "interrupted with Ctrl-C; gpuwarden run and gputop end with 0 then"),
    (143, "gputop was ended (SIGTERM); gpuwarden run ends with 0 then"),
)
_WARDEN_FILES: Final = (
    (str(DEFAULT_POLICY), "The policy. Only root, or whom the agent runs as, may be able to write it."),
    (str(endpoint.PATH), "The agent's socket, for its user and group. It answers questions and takes no orders."),
    (f"{DEFAULT_RUN_DIR}/ledger.jsonl", "What is in force now and has to be undone."),
    (str(DEFAULT_FILE), "The usage ledger, hour by hour."),
)
_WARDEN_ENVIRONMENT: Final = (
    ("GPUWARDEN_BPF_OBJECT", "Where gpuwarden.bpf.o is, if it is not where it was built or installed."),
    ("LD_LIBRARY_PATH", "Folders in which the node's libcuda.so.1 and libnvidia-ml.so.1 are looked for first."),
)
_TOP_ENVIRONMENT: Final = (
    ("NO_COLOR", "If it is set, there are no colours."),
    ("COLUMNS", "How wide a table is that does not go to a terminal (160)."),
)
_MORE: Final = "The documentation that comes with GPU Warden: policy, metrics, operating guide."


def pages(warden: argparse.ArgumentParser, top: argparse.ArgumentParser) -> dict[str, str]:
    """File name → page."""
    first, *below = commands(warden)
    exits = roff.section("exit status", *roff.terms((str(code), meaning) for code, meaning in EXIT))
    return {
        "gpuwarden.8": _page(
            _head(first, 8, _WARDEN_DOES, _WARDEN),
            roff.section("options", *_options(first)),
            roff.section("commands", *(_command(one) for one in below)),
            roff.section("signals", *roff.terms(_SIGNALS)),
            roff.section("files", *roff.terms(_WARDEN_FILES)),
            roff.section("environment", *roff.terms(_WARDEN_ENVIRONMENT)),
            exits,
            _see_also("gputop", 1),
        ),
        "gputop.1": _page(
            _head(next(commands(top)), 1, _TOP_DOES, _TOP),
            roff.section("options", *_options(next(commands(top)))),
            roff.section("files", *roff.terms(_WARDEN_FILES[1:2])),
            roff.section("environment", *roff.terms(_TOP_ENVIRONMENT)),
            exits,
            _see_also("gpuwarden", 8),
        ),
    }


def _page(*parts: str) -> str:
    return "\n".join(part for part in parts if part) + "\n"


def _head(command: Command, section: int, does: str, text: tuple[str, ...]) -> str:
    name = command.parser.prog
    return _page(
        r".\" Generated by `make docs` from the parsers and from manual/pages.py; do not edit.",
        roff.title(name, section, DATE, f"GPU Warden {version('gpuwarden')}", "GPU Warden"),
        roff.section("name", f"{name} \\- {roff.plain(does)}"),
        roff.section("synopsis", _synopsis(command)),
        roff.section("description", roff.paragraphs(text)),
    ).rstrip("\n")


def _synopsis(command: Command) -> str:
    words = [roff.bold(command.parser.prog)]
    words += [f"[{roff.italic('OPTIONS')}]"] if command.options else []
    if not command.path and len(list(commands(command.parser))) > 1:
        words.append(f"{roff.italic('COMMAND')} [{roff.italic('ARGUMENTS')}]")
    words += [roff.italic(value_of(action)) for action in command.positionals]
    return " ".join(words)


def _command(command: Command) -> str:
    head = [roff.bold(" ".join(command.path)), *(roff.italic(value_of(action)) for action in command.positionals)]
    about = [f"{command.help[:1].upper()}{command.help[1:]}."]
    if not command.parser.add_help:  # it hands its options on to a program of its own
        about.append(f"{command.parser.prog} --help tells its options.")
    given = [
        roff.item(roff.italic(value_of(one)), help_of(one, command.parser)) for one in command.positionals if one.help
    ]
    return roff.subsection(" ".join(head), roff.paragraphs(about), *given, *_options(command))


def _options(command: Command) -> list[str]:
    return [roff.item(_tag(action), help_of(action, command.parser)) for action in command.options]


def _tag(action: argparse.Action) -> str:
    names = ", ".join(roff.bold(name) for name in action.option_strings)
    value = value_of(action)
    return f"{names} {roff.italic(value)}" if value else names


def _see_also(name: str, section: int) -> str:
    return roff.section("see also", f"{roff.bold(name)}({section})\n.P\n{roff.plain(_MORE)}")
