# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The table of measured pairs (online kind, offline kind, GPU model), as a predictor and as JSON.

Invariant: few measurements move the prior little, many replace it, `(n·measured + K·prior) / (n + K)`; what cannot run
has no weight even if it was measured once, as memory is the matter of the present slot. A measurement that says what
the prior was then is scaled by how the prior changed: the online load is another one by now.
Text in, text out: who calls reads and writes the files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from typing import Any, Final, NamedTuple, Protocol

from fleet.model import FleetError, Job, Slot, Weight
from fleet.weights.physical import ERROR, Physical

PRIOR_COUNT: Final = 3.0
"""How many measurements (each of ≥ 10 min) the prior counts as"""
MOST_COUNT: Final = 144
"""Measurements that a mean counts as, at most (a day of them): older ones fade"""


class Pair(NamedTuple):
    """What a measurement is about."""

    online: str
    offline: str
    model: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean over the measurements of a pair: launches per second beside the online service ÷ alone."""

    throughput: float
    count: int = 1
    prior: float | None = None
    """Mean of what the prior said of them; None: unknown, and the throughput is taken for any load"""


class Teacher(Protocol):
    """What measured pairs say of others; fleet/weights/learned.py has it."""

    def line(self, pair: Pair) -> tuple[float, float] | None:
        """What is expected, as a constant and a factor of the prior. None: the prior itself."""

    def error(self, pair: Pair) -> float | None: ...
    def why(self, pair: Pair) -> str: ...


@dataclass(frozen=True, slots=True)
class _Column:
    """A job beside the online kind and GPU model of a row: linear in the prior, whatever is known."""

    job: Job
    constant: float
    factor: float
    without: float | None
    """Where the prior knows nothing"""

    def throughput(self, prior: float) -> float:
        found = self.constant + self.factor * prior
        return found if found < 1.0 else 1.0


@dataclass(frozen=True, slots=True)
class Table:
    """Measured pairs over the prior, or over what was learned."""

    pairs: Mapping[Pair, Measured]
    prior: Physical = field(default_factory=Physical)
    learned: Teacher | None = None

    @property
    def name(self) -> str:
        return "table" if self.learned is None else "learned"

    def weight(self, slot: Slot, job: Job) -> Weight | None:
        """None: it cannot run, or nothing is known of it."""
        ((throughput,),) = self.rows((slot,), (job,))
        if throughput is None:
            return None
        if slot.online is None:
            return self.prior.weight(slot, job)
        pair = Pair(slot.online, job.kind, slot.model)
        learned_error = None if self.learned is None else self.learned.error(pair)
        found = self.pairs.get(pair)
        if found is not None:
            error = (ERROR if learned_error is None else learned_error) * sqrt(
                PRIOR_COUNT / (found.count + PRIOR_COUNT)
            )
            return Weight(throughput, error, f"measured {found.count} × beside {slot.online} on {slot.model}")
        if self.learned is None or learned_error is None:
            return self.prior.weight(slot, job)
        return Weight(throughput, learned_error, self.learned.why(pair))

    def rows(self, slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[list[float | None]]:
        """By slot and job."""
        columns: dict[tuple[str, str], list[_Column]] = {}
        for slot, priors in zip(slots, self.prior.rows(slots, jobs), strict=True):
            if slot.online is None:
                yield priors
                continue
            mine = columns.get((slot.online, slot.model))
            if mine is None:
                mine = [self._column(Pair(slot.online, job.kind, slot.model), job) for job in jobs]
                columns[slot.online, slot.model] = mine
            yield [
                column.throughput(prior)
                if prior is not None
                else column.without
                if column.without is not None and self.prior.fits(slot, column.job)
                else None
                for prior, column in zip(priors, mine, strict=True)
            ]

    def _column(self, pair: Pair, job: Job) -> _Column:
        found = self.pairs.get(pair)
        line = None if self.learned is None else self.learned.line(pair)
        constant, factor = line or (0.0, 1.0)
        expected = constant if line is not None and factor == 0 else None
        if found is None:
            return _Column(job, constant, factor, expected)
        part = found.count / (found.count + PRIOR_COUNT)
        measured = (0.0, found.throughput / found.prior) if found.prior else (found.throughput, 0.0)
        mixed = [part * one + (1 - part) * other for one, other in zip(measured, (constant, factor), strict=True)]
        without = found.throughput if expected is None else part * found.throughput + (1 - part) * expected
        return _Column(job, mixed[0], mixed[1], without)

    def with_measurement(self, pair: Pair, throughput: float, prior: float | None) -> Table:
        """With one more measurement in the pair's mean, in which what is long ago fades."""
        if not (isfinite(throughput) and throughput >= 0):
            raise FleetError(f"measured throughput of {pair.offline} is {throughput}: it has to be 0 or more")
        old = self.pairs.get(pair)
        new = Measured(throughput, 1, prior)
        if old is not None:
            before = min(old.count, MOST_COUNT - 1)
            count = before + 1
            mean = None if old.prior is None or prior is None else (old.prior * before + prior) / count
            known = mean if mean is not None else prior if old.prior is None else old.prior  # a window may not say
            new = Measured((old.throughput * before + throughput) / count, count, known)
        return replace(self, pairs={**self.pairs, pair: new})

    def to_json(self) -> str:
        """What `parse` reads."""
        rows = [
            {**pair._asdict(), "throughput": found.throughput, "count": found.count, "prior": found.prior}
            for pair, found in sorted(self.pairs.items())
        ]
        return json.dumps({"pairs": rows}, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Read:
    """What a file held."""

    table: Table
    dropped: Counter[str]
    """Reason → rows that are no measured pair"""


def parse(text: str, prior: Physical | None = None) -> Read:
    """Our own format: {"pairs": [{online, offline, model, throughput, count, prior}, …]}."""
    rows = _loaded(text).get("pairs")
    if not isinstance(rows, list):
        raise FleetError(
            'no table of pairs: the file needs a list under "pairs", of online, offline, model, throughput, count'
        )
    dropped: Counter[str] = Counter()
    pairs = {}
    for row in rows:
        try:
            pair = Pair(*(str(row[name]) for name in Pair._fields))
            found = Measured(float(row["throughput"]), int(row["count"]), _number(row.get("prior")))
        except (KeyError, TypeError, ValueError, AttributeError):
            dropped["a field is missing or of another type"] += 1
            continue
        if not (isfinite(found.throughput) and found.throughput >= 0 and found.count > 0):
            dropped["throughput or count out of range"] += 1
        else:
            pairs[pair] = found
    return Read(Table(pairs, prior or Physical()), dropped)


def parse_colocation(text: str, count: int = 1, prior: Physical | None = None) -> Read:
    """A published co-location table: GPU model → job → job → [rate of the one, rate of the other], "null": alone.

    The first job is taken as the online one, the second as the offline one. `count`: how many measurements of ours a
    row of it counts as.
    """
    dropped: Counter[str] = Counter()
    pairs = {}
    for model, jobs in _loaded(text).items():
        if not isinstance(jobs, dict):
            raise FleetError(f"no co-location table: {model!r} needs an object of jobs")
        alone = {name: _alone(row) for name, row in jobs.items()}
        for online, offline, rates in _cells(jobs):
            reason, throughput = _relative(rates, alone.get(offline))
            if throughput is None:
                dropped[reason] += 1
            else:
                pairs[Pair(online, offline, model)] = Measured(throughput, count)
    if not pairs:
        raise FleetError('no co-location table: no GPU model → job → job → [a, b] with "null" for alone was found')
    return Read(Table(pairs, prior or Physical()), dropped)


def _loaded(text: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise FleetError(f"no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise FleetError("no table: the file needs a JSON object")
    return loaded


def _cells(jobs: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    for online, row in jobs.items():
        if isinstance(row, dict):
            yield from ((online, offline, rates) for offline, rates in row.items() if offline != "null")


def _alone(row: Any) -> float | None:
    """Rate of a job alone: a number, or a list that begins with it."""
    found = row.get("null") if isinstance(row, dict) else None
    return _number(found[0] if isinstance(found, list) and found else found)


def _relative(rates: Any, alone: float | None) -> tuple[str, float | None]:
    if not alone or alone < 0:
        return "the offline job's rate alone is unknown", None
    rate = _number(rates[1]) if isinstance(rates, list) and len(rates) == 2 else None
    if rate is None or rate < 0:
        return "no two rates", None
    if rate == 0:
        return "a rate of 0: the pair did not run", None
    return "", min(1.0, rate / alone)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isfinite(value) else None
