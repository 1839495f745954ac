# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden policy init`: writes a policy that `check` accepts, from answers or flags; replaces no file unasked.

`gpuwarden policy schema` prints the JSON Schema of policies. `init` asks about each running container: its role, and
the SLO of an online one. An empty answer accepts the proposal; after an invalid one the question is repeated.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from agent.config.sections import example, scalar, value_mistake
from agent.core.errors import PolicyError, SetupError, WardenError
from agent.core.model import Snapshot
from agent.core.text import printable
from agent.exporters.api.client import HELP, fetch, place
from agent.tui.terminal import Printer
from enforce.policy import model
from enforce.policy.findings import disputed, findings, warnings
from enforce.policy.load import check_text
from enforce.policy.schema import MatchSection, SloSection, json_schema_page
from gpuwarden.check import show
from gpuwarden.options import DEFAULT_POLICY, running
from gpuwarden.policy_init.draft import Draft, about, left_alone, outcomes, text, title, unintended, unruled, used
from gpuwarden.policy_init.proposal import MatchKeys, Proposal, proposals

Ask = Callable[[str], str]
Say = Callable[[str], None]
_ROLES = {"online": "online", "offline": "offline", "leave": None}


def ask_role(proposal: Proposal, ask: Ask, say: Say) -> str | None:
    """online, offline, or None: left alone."""
    proposed = proposal.role or "leave"
    more = f" and {len(proposal.uses) - 1} more like it" if len(proposal.uses) > 1 else ""
    say(f"\n{title(proposal.uses[0])}{more}: {used(proposal.uses)} ({proposal.why})")
    while True:
        answer = ask(f"  online, offline or leave alone? [{proposed}] ").strip().lower() or proposed
        fitting = [word for word in _ROLES if word.startswith(answer)]
        if len(fitting) == 1:
            return _ROLES[fitting[0]]
        say("  write online, offline or leave; the beginning of the word is enough")


def mistakes(promise: Mapping[str, str]) -> list[str]:
    """What is wrong with the options of the SLO, before the first question; each begins with its option."""
    wrong = ((key, _mistake(key, value)) for key, value in promise.items())
    return [f"--{'slo' if key == 'target' else key}: {mistake}" for key, mistake in wrong if mistake is not None]


def ask_slo(ask: Ask, say: Say, defaults: dict[str, str]) -> dict[str, str]:
    """The SLO: target, signal, and the keys of that signal. Keys of other signals in `defaults` are dropped."""
    answers = {"target": _value("target", "latency target of 99 % of its requests", defaults["target"], ask, say)}
    answers["signal"] = _value("signal", f"measured by {', '.join(model.SIGNALS)}", defaults["signal"], ask, say)
    needed = model.NEEDED_KEYS[answers["signal"]]
    for key in (*needed, "symbol") if answers["signal"] == "uprobe" else needed:
        answers[key] = _value(key, f"its {key}", defaults.get(key), ask, say)
    own = model.SIGNAL_KEYS[answers["signal"]]
    foreign = {key for keys in model.SIGNAL_KEYS.values() for key in keys if key not in own}
    return {**{key: value for key, value in defaults.items() if key not in foreign}, **answers}


def _value(key: str, question: str, default: str | None, ask: Ask, say: Say) -> str:
    shown = f" [{default}]" if default is not None else f" (such as {example(SloSection.model_fields[key])})"
    while True:
        answer = ask(f"  {question}?{shown} ").strip() or default or ""
        mistake = _mistake(key, answer)
        if mistake is None:
            return answer
        say(f"  {mistake}")


def _mistake(key: str, value: str) -> str | None:
    return value_mistake(SloSection, key, scalar(value))


def listed(proposals: Iterable[Proposal]) -> list[tuple[str, ...]]:
    """Rows of a table: container, GPU use, proposed role, reason."""
    return [
        (
            f"{title(one.uses[0])}{f' (×{len(one.uses)})' if len(one.uses) > 1 else ''}",
            used(one.uses),
            one.role or "–",
            one.why,
        )
        for one in proposals
    ]


SIGNAL_OPTIONS = ("port", "path", "url", "metric", "unit", "binary", "symbol")

_MATCH = (
    "KEY=PATTERN[,KEY=PATTERN…], such as namespace=serving,pod=chat-* or labels.app=chat; or NAMESPACE/POD, or NAME"
)

_EPILOG = """\
without --online and --offline: on a terminal, asks about each container that uses a GPU now; otherwise uses its own
proposals. Examples:
  gpuwarden policy init
  gpuwarden policy init --online serving/chat-* --slo 50ms --offline namespace=batch
  gpuwarden policy init --online web --slo 20ms --signal http --port 8000 --offline 'train-*' policy.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands `init` and `schema` and their options; `word` is the one given."""
    words = parser.add_subparsers(required=True, metavar="WORD", dest="word")
    init = words.add_parser(
        "init",
        help="write a commented first policy from the running containers, with enforce: false",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    add = init.add_argument
    add("file", nargs="?", default=str(DEFAULT_POLICY), metavar="FILE", help="file to write (%(default)s); - prints it")
    add("--online", action="append", default=[], metavar="MATCH", help=f"containers with a latency SLO: {_MATCH}")
    add(
        "--offline",
        action="append",
        default=[],
        metavar="MATCH",
        help="containers that may be slowed (as --online)",
    )
    add("--slo", default="50ms", metavar="TARGET", help="latency target of --online (%(default)s)")
    add("--quantile", default="0.99", metavar="Q", help="quantile of the latency (%(default)s)")
    add("--signal", default="gpu_wait", help="source of the latency: gpu_wait, http, prometheus, uprobe (%(default)s)")
    for option in SIGNAL_OPTIONS:
        add(f"--{option}", metavar=option.upper(), help=f"slo.{option}, for a signal that has it (docs/policy.md)")
    add("--force", action="store_true", help="replace an existing file")
    add("--socket", type=Path, help=HELP)
    words.add_parser("schema", help="print the JSON Schema of policies, for editors")


_STDOUT = "-"


def act(options: argparse.Namespace) -> int:
    """`init` or `schema`."""
    if options.word == "schema":
        sys.stdout.write(json_schema_page())
        return 0
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    socket = options.socket or place()
    env = Environment(input if interactive else None, sys.stdout, lambda: running(socket), lambda: fetch(socket))
    return init(options, env)


@dataclass(frozen=True, slots=True)
class Environment:
    """The terminal and the agent. `ask` is None without a terminal; `running` may take seconds, `known` does not."""

    ask: Ask | None
    out: TextIO
    running: Callable[[], Snapshot]
    known: Callable[[], Snapshot | None]  # of a running agent


def init(options: argparse.Namespace, env: Environment) -> int:
    """Exit code 0, or 2 where the flags make no valid policy. SetupError: the file exists, or there is no terminal."""
    file = options.file
    if file != _STDOUT and not options.force and os.path.lexists(file):
        raise SetupError(f"{file} exists: give another FILE, or --force to replace it")
    slo, by_flags = _slo(options), bool(options.online or options.offline)
    if by_flags:
        now = _known(env)
        written = _from_flags(options, slo, now, file)
    else:
        if env.ask is not None and (wrong := mistakes(slo)):
            raise PolicyError(wrong)
        try:
            written, now = _from_running(proposals(env.running()), slo, env, file)
        except EOFError:
            raise SetupError("no answer (end of input): nothing was written") from None
    checked = check_text(written, "the policy" if file == _STDOUT else file)
    if checked.value is None:
        show(checked, findings(checked), env.out)
        return PolicyError.exit_code
    made = outcomes(checked.value, now)
    written += left_alone(unruled(made))
    if file == _STDOUT:
        env.out.write(written)
        return 0
    _write(Path(file), written, options.force)
    found = [*disputed(checked.value, [use.facts for one in now for use in one.uses])]
    found += [] if by_flags else unintended(checked.value, made)  # flags do not name containers to be left alone
    show(checked, [*findings(checked), *warnings(checked, found)], env.out)
    Printer(env.out).line(f"written to {printable(file)}; its first lines describe the next steps")
    return 0


def _known(env: Environment) -> list[Proposal]:
    """Proposals for comments only: none where the agent cannot be asked."""
    with suppress(WardenError):
        live = env.known()
        return proposals(live) if live is not None else []
    return []


def _from_flags(options: argparse.Namespace, slo: dict[str, str], now: Sequence[Proposal], file: str) -> str:
    online, offline = (
        [Draft(_stem(match), match, _now(match, now)) for match in map(_match, given)]
        for given in (options.online, options.offline)
    )
    promised = [Draft(one.name, one.match, one.about, slo) for one in online]
    return text(promised, offline, file)


def _from_running(
    found: Sequence[Proposal], slo: dict[str, str], env: Environment, file: str
) -> tuple[str, list[Proposal]]:
    """The policy as text, and the proposals with the roles that were answered."""
    if env.ask is not None:
        screen = Printer(env.out)
        screen.table(("CONTAINER", "GPU USE", "PROPOSED", "REASON"), listed(found))
    online, offline, answered = [], [], []
    for one in found:
        role = one.role
        if env.ask is not None and one.match is not None:
            role = ask_role(one, env.ask, _say(env.out))
        answered.append(replace(one, role=role))
        if role is None or one.match is None:
            continue
        if role == "online":
            promise = slo if env.ask is None else ask_slo(env.ask, _say(env.out), slo)
            online.append(Draft(one.name, one.match, about(one), promise))
        else:
            offline.append(Draft(one.name, one.match, about(one)))
    return text(online, offline, file), answered


def _say(out: TextIO) -> Say:
    return lambda line: print(line, file=out, flush=True)


def _now(match: MatchKeys, now: Sequence[Proposal]) -> tuple[str, ...]:
    return next((about(one) for one in now if one.match is not None and dict(one.match) == dict(match)), ())


def _slo(options: argparse.Namespace) -> dict[str, str]:
    given = {key: value for key in SIGNAL_OPTIONS if (value := getattr(options, key)) is not None}
    promise = {"signal": options.signal, "quantile": options.quantile, "target": options.slo, "window": "10s"}
    return {**promise, **given}


def _match(given: str) -> MatchKeys:
    """A match as it is typed: NAMESPACE/POD, a container's NAME, or KEY=PATTERN with commas between."""
    if "=" not in given:
        namespace, slash, pod = given.partition("/")
        return {"namespace": namespace, "pod": pod} if slash else {"container": given}
    match: dict[str, str | list[str] | dict[str, str]] = {}
    labels: dict[str, str] = {}
    for part in given.split(","):
        key, _, pattern = part.partition("=")
        section, _, label = key.partition(".")
        if section in ("label", "labels") and label and pattern:
            labels[label] = pattern
        elif key in MatchSection.model_fields and key != "labels" and pattern:
            before = match.get(key)
            match[key] = (
                pattern if before is None else [*(before if isinstance(before, list) else [str(before)]), pattern]
            )
        else:
            keys = ", ".join(key for key in MatchSection.model_fields if key != "labels")
            raise PolicyError([f"{part!r} in {given!r}: write KEY=PATTERN, KEY being one of {keys}, labels.NAME"])
    return {**match, **({"labels": labels} if labels else {})}


def _stem(match: MatchKeys) -> str:
    """A rule's name, from the most specific key of the match."""
    for key in ("container", "pod", "unit", "image", "labels", "namespace", "user", "command", "cgroup"):
        value = match.get(key)
        if value:
            inner = next(iter(value.values())) if isinstance(value, dict) else value
            return "".join(inner[0] if isinstance(inner, list) else str(inner)).strip("*?-[]/")
    return "rule"


def _write(path: Path, written: str, force: bool) -> None:
    """Writes the file atomically, readable by all: it holds no secrets."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".policy")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(written)
                os.fchmod(file.fileno(), 0o644)
            (os.replace if force else os.link)(temporary, path)  # a link fails where a file was made meanwhile
        finally:
            Path(temporary).unlink(missing_ok=True)
    except FileExistsError as error:
        raise SetupError(f"{path} exists: give another FILE, or --force to replace it") from error
    except OSError as error:
        raise SetupError(f"cannot write {path} ({error.strerror}): run as root, or give another FILE") from error
