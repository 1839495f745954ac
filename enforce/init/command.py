# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden policy init`: asks or takes flags, writes a policy that `check` accepts, and never over another one."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from agent.errors import PolicyError, SetupError, WardenError
from agent.model import Snapshot
from agent.names import printable
from enforce.check import Finding, findings, show
from enforce.explain.screen import Screen
from enforce.init import questions
from enforce.init.arguments import SIGNAL_OPTIONS
from enforce.init.draft import Draft, about, left, text
from enforce.init.outcome import alone, outcomes, taken
from enforce.init.proposal import Proposal, Written, proposals
from enforce.policy.load import judge
from enforce.policy.running import disputed
from enforce.policy.schema import MatchSection

_STDOUT = "-"


@dataclass(frozen=True, slots=True)
class Here:
    """Where it runs. `ask` is None where there is nobody to ask; `running` may take a while, `known` does not."""

    ask: questions.Ask | None
    out: TextIO
    running: Callable[[], Snapshot]
    known: Callable[[], Snapshot | None]  # of an agent that is there anyway


def init(options: argparse.Namespace, here: Here) -> int:
    """Exit code 0, or 2 when the flags make no right policy. SetupError: a file is in the way, or nobody can say."""
    file = options.file
    if file != _STDOUT and not options.force and os.path.lexists(file):
        raise SetupError(f"{file} is there already: give another FILE, or --force to write over it")
    slo, by_flags = _slo(options), bool(options.online or options.offline)
    if by_flags:
        now = _known(here)
        written = _from_flags(options, slo, now, file)
    else:
        if here.ask is not None and (wrong := questions.mistakes(slo)):
            raise PolicyError(wrong)
        try:
            written, now = _from_running(proposals(here.running()), slo, here, file)
        except EOFError:
            raise SetupError("nobody answers: nothing was written") from None
    judged = judge(written, "the policy" if file == _STDOUT else file)
    if judged.policy is None:
        show(judged, findings(judged, None), here.out)
        return PolicyError.exit_code
    made = outcomes(judged.policy, now)
    written += left(alone(made))
    if file == _STDOUT:
        here.out.write(written)
        return 0
    _write(Path(file), written, options.force)
    told = [*disputed(judged.policy, [use.facts for one in now for use in one.uses])]
    told += [] if by_flags else taken(judged.policy, made)  # flags do not say who is to be left alone
    unlike = [Finding("warning", judged.read.place(one.path), one.text) for one in told]
    show(judged, [*findings(judged, None), *unlike], here.out)
    Screen(here.out).line(f"written to {printable(file)}; its first lines say how to go on")
    return 0


def _known(here: Here) -> list[Proposal]:
    """Only for comments: who may not ask the agent writes none."""
    with suppress(WardenError):
        live = here.known()
        return proposals(live) if live is not None else []
    return []


def _from_flags(options: argparse.Namespace, slo: dict[str, str], now: Sequence[Proposal], file: str) -> str:
    online, offline = (
        [Draft(_stem(match), match, _now(match, now)) for match in map(_match, given)]
        for given in (options.online, options.offline)
    )
    promised = [Draft(one.name, one.match, one.about, slo) for one in online]
    return text(promised, offline, file)


def _from_running(found: Sequence[Proposal], slo: dict[str, str], here: Here, file: str) -> tuple[str, list[Proposal]]:
    """The policy, and the proposals with the roles that were answered."""
    if here.ask is not None:
        screen = Screen(here.out)
        screen.table(("USES A GPU NOW", "SO MUCH", "PROBABLY", "BECAUSE"), questions.listed(found))
    online, offline, answered = [], [], []
    for one in found:
        role = one.role
        if here.ask is not None and one.match is not None:
            role = questions.role(one, here.ask, _say(here.out))
        answered.append(replace(one, role=role))
        if role is None or one.match is None:
            continue
        if role == "online":
            promise = slo if here.ask is None else questions.slo(here.ask, _say(here.out), slo)
            online.append(Draft(one.name, one.match, about(one), promise))
        else:
            offline.append(Draft(one.name, one.match, about(one)))
    return text(online, offline, file), answered


def _say(out: TextIO) -> questions.Say:
    return lambda line: print(line, file=out, flush=True)


def _now(match: Written, now: Sequence[Proposal]) -> tuple[str, ...]:
    return next((about(one) for one in now if one.match is not None and dict(one.match) == dict(match)), ())


def _slo(options: argparse.Namespace) -> dict[str, str]:
    given = {key: value for key in SIGNAL_OPTIONS if (value := getattr(options, key)) is not None}
    promise = {"signal": options.signal, "quantile": options.quantile, "target": options.slo, "window": "10s"}
    return {**promise, **given}


def _match(given: str) -> Written:
    """A match as people type it: NAMESPACE/POD, a container's NAME, or KEY=PATTERN with commas between."""
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


def _stem(match: Written) -> str:
    """A rule's name: of the most particular thing that the match names, the letters."""
    for key in ("container", "pod", "unit", "image", "labels", "namespace", "user", "command", "cgroup"):
        value = match.get(key)
        if value:
            inner = next(iter(value.values())) if isinstance(value, dict) else value
            return "".join(inner[0] if isinstance(inner, list) else str(inner)).strip("*?-[]/")
    return "rule"


def _write(path: Path, written: str, force: bool) -> None:
    """Whole or not at all, and readable by all: it holds nothing secret."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor, whole = tempfile.mkstemp(dir=path.parent, prefix=".policy")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(written)
                os.fchmod(file.fileno(), 0o644)
            (os.replace if force else os.link)(whole, path)  # a link does not replace what came meanwhile
        finally:
            Path(whole).unlink(missing_ok=True)
    except FileExistsError as error:
        raise SetupError(f"{path} is there already: give another FILE, or --force to write over it") from error
    except OSError as error:
        raise SetupError(f"cannot write {path} ({error.strerror}): run as root, or give another FILE") from error
