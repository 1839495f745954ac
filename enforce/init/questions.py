# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Asking about each container that runs: what it is, and if it is online, what it is promised.

An empty answer takes the proposal; one that makes no sense is told so and asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pydantic_core import PydanticCustomError

from enforce.init.draft import title, used
from enforce.init.proposal import Proposal
from enforce.policy import vocabulary
from enforce.policy.kind import scalar
from enforce.policy.schema import SloSection
from enforce.policy.sections import kind_at

Ask = Callable[[str], str]
Say = Callable[[str], None]
_ROLES = {"online": "online", "offline": "offline", "leave": None}


def role(proposal: Proposal, ask: Ask, say: Say) -> str | None:
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
    """What is wrong with it before anything was asked, by the option that it came from."""
    wrong = ((key, _mistake(key, value)) for key, value in promise.items())
    return [f"--{'slo' if key == 'target' else key}: {mistake}" for key, mistake in wrong if mistake is not None]


def slo(ask: Ask, say: Say, defaults: dict[str, str]) -> dict[str, str]:
    """The promise: target and signal, and what the signal needs. What `defaults` say of another signal is dropped."""
    told = {"target": _value("target", "latency promised to 99 % of its requests", defaults["target"], ask, say)}
    told["signal"] = _value("signal", f"measured by {', '.join(vocabulary.SIGNALS)}", defaults["signal"], ask, say)
    needed = vocabulary.NEEDED_KEYS[told["signal"]]
    for key in (*needed, "symbol") if told["signal"] == "uprobe" else needed:
        told[key] = _value(key, f"its {key}", defaults.get(key), ask, say)
    own = vocabulary.SIGNAL_KEYS[told["signal"]]
    foreign = {key for keys in vocabulary.SIGNAL_KEYS.values() for key in keys if key not in own}
    return {**{key: value for key, value in defaults.items() if key not in foreign}, **told}


def _value(key: str, question: str, default: str | None, ask: Ask, say: Say) -> str:
    shown = f" [{default}]" if default is not None else f" (such as {kind_at(SloSection, key).example})"
    while True:
        answer = ask(f"  {question}?{shown} ").strip() or default or ""
        mistake = _mistake(key, answer)
        if mistake is None:
            return answer
        say(f"  {mistake}")


def _mistake(key: str, value: str) -> str | None:
    try:
        kind_at(SloSection, key).read(scalar(value))
    except PydanticCustomError as error:
        return error.message()
    return None


def listed(proposals: Iterable[Proposal]) -> list[tuple[str, ...]]:
    """Rows of a table: who, what it uses, what it probably is, and why."""
    return [
        (
            f"{title(one.uses[0])}{f' (×{len(one.uses)})' if len(one.uses) > 1 else ''}",
            used(one.uses),
            one.role or "–",
            one.why,
        )
        for one in proposals
    ]
