# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench hostile`: what an online service notices of a hostile neighbour, and what the guards cost a launch.

The agent enforces a policy: an online service, an offline job that its rule slows, and one attacker, each in a cgroup
of its own. A phase is a fresh agent, the attacker, then the service and the job; what is measured is the service's own
p99. Each attacker has a phase, and beside it one with a program that burns as many CPUs without a call to CUDA, since
any program slows a machine with few CPUs; each round has one of each, in turns, and one phase without either.

An attacker is contained when, in the median of the rounds, the p99 beside it is at most 1.1 times that beside the
program that burns, and in every round each launch of the service was counted, the job was stopped for it, and neither
was refused memory or evicted. The second part is bench/latency/launch_cost.py; it is printed, not judged.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.hostile.attackers import ATTACKERS, Attacker, build
from bench.hostile.phase import Measured, Setting, open_setting
from bench.latency import launch_cost

MOST_RATIO: Final = 1.1
_NEVER: Final = "none"


def rounds(setting: Setting, attackers: Sequence[Attacker], count: int) -> dict[str, list[dict[str, Measured]]]:
    """By attacker: for each round what was measured `alone`, `beside` it, and beside what `burns`."""
    found: dict[str, list[dict[str, Measured]]] = {attacker.name: [] for attacker in attackers}
    for number in range(count):
        alone: dict[bool, Measured] = {}
        for attacker in attackers:
            if attacker.http not in alone:
                alone[attacker.http] = _said(setting.phase(None, http=attacker.http), "alone")
            pair = {}
            for kind in ("burns", "beside")[:: 1 if number % 2 else -1]:
                one = setting.phase(attacker, http=attacker.http, burning=kind == "burns")
                pair[kind] = _said(one, f"{kind} {attacker.name}")
            found[attacker.name].append({"alone": alone[attacker.http], **pair})
    return found


def _said(one: Measured, name: str) -> Measured:
    print(
        f"{name}: p99 {one.p99_s * 1e3:.2f} ms, {one.stops_per_second:.0f} stops/s, {one.counted} of {one.made} "
        f"launches counted, {one.refused} refused, {one.stolen_ratio:.1%} stolen; {_listed(one.seen)}",
        flush=True,
    )
    return one


def _more(seen: Mapping[str, int], otherwise: Mapping[str, int]) -> dict[str, int]:
    more = {name: count - otherwise.get(name, 0) for name, count in seen.items()}
    return {name: count for name, count in more.items() if count > 0}


def _listed(seen: Mapping[str, int], most: int = 6) -> str:
    largest = sorted(seen.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {count}" for name, count in largest) or "nothing seen"


def row(attacker: Attacker, found: Sequence[Mapping[str, Measured]]) -> dict[str, Any]:
    """One attacker, over the rounds."""
    of_both = [one["beside"].p99_s / one["burns"].p99_s for one in found]
    counted = [one["beside"].counted / one["beside"].made for one in found]
    made = {
        "attacker": attacker.name,
        "what": attacker.what,
        "busy_threads": attacker.busy,
        "p99_ratio": _middle(one["beside"].p99_s / one["alone"].p99_s for one in found),
        "baseline_p99_ratio": _middle(one["burns"].p99_s / one["alone"].p99_s for one in found),
        "ratio_of_both": _spread(of_both),
        "launches_counted_ratio": _spread(counted),
        "offline_stops_per_second": _middle(one["beside"].stops_per_second for one in found),
        "baseline_stops_per_second": _middle(one["burns"].stops_per_second for one in found),
        "offline_sm_ratio": _middle(one["beside"].offline_sm_ratio for one in found),
        "baseline_sm_ratio": _middle(one["burns"].offline_sm_ratio for one in found),
        "denied_or_evicted": sum(one["beside"].refused for one in found),
        "stolen_ratio": round(max(one[kind].stolen_ratio for one in found for kind in ("beside", "burns")), 4),
        "seen": _more(found[-1]["beside"].seen, found[-1]["burns"].seen),
        "rounds": len(found),
    }
    return {**made, "holds": holds(made)}


def _middle(values: Iterable[float]) -> float:
    return round(median(values), 3)


def _spread(values: Sequence[float]) -> list[float]:
    """Median, least, most."""
    return [round(median(values), 3), round(min(values), 3), round(max(values), 3)]


def holds(one: Mapping[str, Any]) -> bool:
    """Whether the attacker is contained."""
    exact = one["launches_counted_ratio"][1:] == [1.0, 1.0]
    works = one["offline_stops_per_second"] > 0 and not one["denied_or_evicted"]
    return bool(one["ratio_of_both"][0] <= MOST_RATIO and exact and works)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of all attackers."""
    made = Table(
        "attacker",
        "p99 to alone",
        "CPU burner's",
        "ratio of both (least–most)",
        "counted",
        "stops/s",
        "burner's",
        "refused",
        f"≤ {MOST_RATIO}",
        title="an online service beside hostile programs",
    )
    for one in rows:
        middle, least, most = one["ratio_of_both"]
        made.add_row(
            one["attacker"],
            f"{one['p99_ratio']:.2f}",
            f"{one['baseline_p99_ratio']:.2f}",
            f"{middle:.2f} ({least:.2f}–{most:.2f})",
            f"{one['launches_counted_ratio'][1]:g}",
            f"{one['offline_stops_per_second']:.0f}",
            f"{one['baseline_stops_per_second']:.0f}",
            str(one["denied_or_evicted"]),
            "yes" if one["holds"] else "NO",
        )
    return made


def beside_attackers(attackers: Sequence[Attacker], count: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of the first part."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-hostile-") as name, open_setting(Path(name), seconds) as setting:
        build(setting.programs)
        for http in sorted({attacker.http for attacker in attackers}):
            print(f"target of the signal {'http' if http else 'gpu_wait'}: {setting.set_target(http) / 1e6:.2f} ms")
        began = time.monotonic()
        found = rounds(setting, attackers, count)
        print(f"{count} rounds took {(time.monotonic() - began) / 60:.0f} min")
    return [row(attacker, found[attacker.name]) for attacker in attackers]


def _attackers(text: str) -> list[Attacker]:
    known = {attacker.name: attacker for attacker in ATTACKERS}
    names = [] if text == _NEVER else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"no attacker is called {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every attacker is contained."""
    parser = argparse.ArgumentParser(prog="python -m bench hostile", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each phase (default %(default)s)")
    parser.add_argument(
        "--attackers", type=_attackers, default=list(ATTACKERS), metavar="A,B", help="these alone; none: no such part"
    )
    parser.add_argument("--launches", type=int, default=200_000, help="of each program and round; 0: no such part")
    parser.add_argument(
        "--before", type=Path, metavar="OBJECT", help="another build of gpuwarden.bpf.o to compare with"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    beside = beside_attackers(options.attackers, options.rounds, options.seconds) if options.attackers else []
    launches = launch_cost.rows(options.before, options.rounds, options.launches) if options.launches else []
    console = Console(width=140)
    if beside:
        console.print(table(beside))
    if launches:
        console.print(launch_cost.table(launches))
    for one in beside:
        print(f"{one['attacker']}: {one['what']}; {_listed(one['seen'])}")
    if options.json:
        rows = {"attackers": beside, "launches": launches}
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    missed = [one["attacker"] for one in beside if not one["holds"]]
    not_contained = f": not {', '.join(missed)}" if missed else ""
    print(f"hostile: {len(beside) - len(missed)} of {len(beside)} contained{not_contained}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
