# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What would be done now, as a table for people: a line for each container, then why, and what stands in the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Final

from enforce.explain.choice import shown
from enforce.explain.text import milliseconds, percent

if TYPE_CHECKING:
    from enforce.plan import Planned

COLUMNS: Final = ("CONTAINER", "ROLE", "RULE", "FOR", "LATENCY/TARGET", "SLACK", "SHARE", "QUEUE")


def cells(one: Planned) -> tuple[str, ...]:
    """The container's line. A dash: there is none, or it is unknown."""
    stance, decision = one.stance, one.decision
    if decision is not None:
        reading = _reading(decision.latency_ns, decision.target_ns)
        slack, queued = percent(decision.slack_ratio), milliseconds(decision.max_queued_ns)
        ruler = shown(decision.ruler_name)
    else:
        latency, target = stance.latency_seconds, stance.target_seconds
        reading = "–" if target is None else _reading(None if latency is None else latency * 1e9, target * 1e9)
        slack = "–" if latency is None or target is None else percent((target - latency) / target)
        queued = ruler = "–"
    share = "–" if stance.share_ratio is None else percent(stance.share_ratio)
    rule = "–" if stance.rule is None else shown(stance.rule)
    return (shown(one.name), stance.role, rule, ruler, reading, slack.replace("unknown", "–"), share, queued)


def notes(one: Planned) -> list[str]:
    """Why this share, which rungs would act, and what stands in the others' way."""
    said = [f"why: {shown(one.stance.reason)}"] if one.stance.reason else []
    able = [rung for rung, obstacle in one.rungs.items() if obstacle is None]
    if able:
        said.append(f"ladder: {', '.join(able)}")
    return said + [f"{rung} cannot: {shown(why)}" for rung, why in one.rungs.items() if why is not None]


def show(planned: Sequence[Planned], enforced: bool, out: IO[str]) -> None:
    """Prints it, as wide as the terminal; 80 columns without one."""
    from enforce.explain.screen import Screen  # rich is slow to import

    screen = Screen(out)
    if not planned:
        screen.line("no container uses a GPU now: there is nothing to decide")
        return
    screen.table(COLUMNS, [cells(one) for one in planned])
    for one in planned:
        if said := notes(one):
            screen.line()
            screen.line(shown(one.name), style="bold")
            for note in said:
                screen.line(f"  {note}")
    screen.line()
    screen.line(
        "nothing was done: this is what the agent would decide with this policy"
        if enforced
        else "the policy has `enforce: false`: the agent decides this too, and does nothing about it"
    )


def _reading(latency_ns: float | None, target_ns: float) -> str:
    return f"{'–' if latency_ns is None else milliseconds(latency_ns)} / {milliseconds(target_ns)}"
