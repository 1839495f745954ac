# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the extender answers for one pod: which nodes, how good each is, and why not the others.

Invariant: a node is offered only for a GPU that is free and that the plan gives to this type of job; so answering pods
one at a time carries the plan out, in whatever order the scheduler brings them. Where there is none such, as the job's
type came since the plan or the scheduler has reasons of its own against those nodes, slots are offered that the plan
needs for no job (their price is 0), and else the pod waits for the next plan. Pure: the state is a value, and booking a
GPU gives another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fleet.match.plan import Plan
from fleet.match.types import job_key
from fleet.model import Job, Predictor, throughput_rows

MOST_SCORE: Final = 10
"""Of the extender's protocol: scores are 0 to 10"""
WAITS: Final = "waits for the next plan"
TAKEN: Final = "its GPUs have an offline job"
ELSEWHERE: Final = "the plan has another GPU for it, where the total is greater"
_GIB: Final = 1 << 30
_MOST_REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A GPU that the pod may have."""

    node: str
    gpu: str
    slot_type: int | None
    """None: no job of the plan can run there"""
    planned: bool
    """The plan means it for this type of job; else it is left over"""
    throughput: float
    """Expected"""


@dataclass(frozen=True, slots=True)
class Board:
    """A plan, and what has become of it since."""

    plan: Plan
    predictor: Predictor
    """Of the plan: for jobs that came since"""
    by_node: Mapping[str, tuple[tuple[str, int, int | None], ...]]
    """Node → GPU, place and type of each of its slots; type None: no job of the plan can run there"""
    types: Mapping[object, int]
    """Key of a job type → its place"""
    taken: frozenset[str]
    """GPUs that were given away since the plan"""
    left: Mapping[tuple[int, int], int]
    """(slot type, job type) → pairs of the plan that are not booked yet"""
    spare: Mapping[int, int]
    """Slot type → slots that the plan needs for no job"""
    free: Mapping[int, Mapping[str, tuple[str, ...]]]
    """Slot type → node → its GPUs of that type that are free: an answer over all nodes is a few dictionary updates"""
    memory: dict[Job, Sequence[float | None]] = field(default_factory=dict, compare=False)
    """Of `weights`: nothing that is booked changes them"""

    @classmethod
    def of(cls, plan: Plan, predictor: Predictor) -> Board:
        """Nothing is taken yet."""
        type_of = {place: at for at, one in enumerate(plan.slot_types) for place in one.members}
        by_node: dict[str, list[tuple[str, int, int | None]]] = {}
        for place, slot in enumerate(plan.slots):
            by_node.setdefault(slot.node, []).append((slot.gpu, place, type_of.get(place)))
        free: dict[int, dict[str, tuple[str, ...]]] = {}
        for slot, slot_type in ((plan.slots[place], at) for place, at in type_of.items()):
            gpus = free.setdefault(slot_type, {})
            gpus[slot.node] = tuple(sorted((*gpus.get(slot.node, ()), slot.gpu)))
        spare = {at: len(one.members) for at, one in enumerate(plan.slot_types)}
        for (slot_type, _), amount in plan.amounts.items():
            spare[slot_type] -= amount
        return cls(
            plan=plan,
            predictor=predictor,
            by_node={node: tuple(found) for node, found in by_node.items()},
            types={job_key(one.job, plan.granularity): at for at, one in enumerate(plan.job_types)},
            taken=frozenset(),
            left=plan.amounts,
            spare=spare,
            free=free,
        )

    def job_type(self, job: Job) -> int | None:
        """None: it came since the plan, or asks for more than what the plan took for its type."""
        found = self.types.get(job_key(job, self.plan.granularity))
        if found is None:
            return None
        hardest = self.plan.job_types[found].job
        harder = job.memory_bytes > hardest.memory_bytes or (job.kernel_s or 0.0) > (hardest.kernel_s or 0.0)
        return None if harder else found

    def weights(self, job: Job) -> Sequence[float | None]:
        """By place of the slot, for a job of no type of the plan; None: no pair."""
        asked = replace(job, key="")
        found = self.memory.get(asked)
        if found is None:
            found = [row[0] for row in throughput_rows(self.predictor, self.plan.slots, (asked,))]
            if len(self.memory) >= _MOST_REMEMBERED:
                self.memory.clear()
            self.memory[asked] = found
        return found

    def booked(self, candidate: Candidate, job: Job) -> Board:
        """After the job got the GPU."""
        slot_type, job_type = candidate.slot_type, self.job_type(job)
        board = self._without_gpu(candidate.gpu, candidate.node, slot_type)
        if slot_type is None:
            return board
        if candidate.planned and job_type is not None:
            pair = (slot_type, job_type)
            return replace(board, left={**self.left, pair: self.left[pair] - 1})
        return replace(board, spare={**self.spare, slot_type: self.spare[slot_type] - 1})

    def caught_up(self, given: Mapping[str, Job | None]) -> Board:
        """After GPUs were given away while the plan was made. `given`: GPU → the job that has it, if it is known."""
        places = {gpu: (node, slot_type) for node, found in self.by_node.items() for gpu, _, slot_type in found}
        board = self
        for gpu, job in given.items():
            if gpu in places:
                board = board.without(gpu, places[gpu], job)
        return board

    def without(self, gpu: str, place: tuple[str, int | None], job: Job | None) -> Board:
        """After the job, if it is known, got the GPU of that node and type in another way than by this plan."""
        node, slot_type = place
        return self._without_slot(slot_type, job)._without_gpu(gpu, node, slot_type)  # noqa: SLF001  of this class

    def _without_gpu(self, gpu: str, node: str, slot_type: int | None) -> Board:
        taken = self.taken | {gpu}
        if slot_type is None:
            return replace(self, taken=taken)
        gpus = dict(self.free[slot_type])
        left = tuple(one for one in gpus.pop(node, ()) if one != gpu)
        return replace(self, taken=taken, free={**self.free, slot_type: {**gpus, node: left} if left else gpus})

    def _without_slot(self, slot_type: int | None, job: Job | None) -> Board:
        """One less: the job's own pair if the plan has it, else a spare slot, else the pair that is worth least."""
        if slot_type is None:
            return self
        weights = self.plan.slot_types[slot_type].weights
        pairs = [pair for pair, amount in self.left.items() if pair[0] == slot_type and amount > 0]
        own = None if job is None else (slot_type, self.job_type(job))
        if own not in pairs and self.spare[slot_type] > 0:
            return replace(self, spare={**self.spare, slot_type: self.spare[slot_type] - 1})
        lost = own if own in pairs else min(pairs, key=lambda pair: weights[pair[1]] or 0.0, default=None)
        return replace(self, left={pair: amount - (pair == lost) for pair, amount in self.left.items()})


@dataclass(frozen=True, slots=True)
class Filtered:
    """Which nodes, and why not the others."""

    nodes: tuple[str, ...]
    refused: Mapping[str, str]


_Best = tuple[bool, float, str, int | None]
"""Not planned, −throughput, GPU, slot type: the least is best"""


@dataclass(frozen=True, slots=True)
class _Question:
    """One pod: what is the same for all nodes is worked out once."""

    board: Board
    job: Job
    job_type: int | None
    offered: Mapping[int | None, tuple[bool, float | None]]
    """Slot types that the job may have → whether the plan means them for it, and the expected throughput where the
    type of job is known"""
    rivals: Mapping[int, tuple[float, str]]
    """Slot type → the most that it is worth to a type of job that the plan means it for, and that job's kind"""

    def throughput(self, place: int, slot_type: int | None) -> float | None:
        """Expected of the job in the slot; None: no pair."""
        if self.job_type is not None:
            return None if slot_type is None else self.board.plan.slot_types[slot_type].weights[self.job_type]
        return self.board.weights(self.job)[place]

    def bests(self) -> Mapping[str, _Best]:
        """Node → the best of its GPUs for the job; nodes without one are missing."""
        free = self.board.free
        if self.job_type is None:
            found = {node: self._best(node) for node in self.board.by_node}
            return {node: best for node, best in found.items() if best is not None}
        bests: dict[str, _Best] = {}
        for best in sorted(self._types(), reverse=True):
            bests.update(dict.fromkeys(free.get(best[3], {}), best))
        return bests

    def _types(self) -> list[tuple[bool, float, str, int]]:
        """Of a known type of job, what each slot type is to it: the GPU is left open."""
        return [
            (not planned, -throughput, "", slot_type)
            for slot_type, (planned, throughput) in self.offered.items()
            if throughput and slot_type is not None
        ]

    def best(self, node: str) -> _Best | None:
        """Of one node, with the GPU."""
        if self.job_type is None:
            return self._best(node)
        for not_planned, negative, _, slot_type in sorted(self._types()):
            if gpus := self.board.free.get(slot_type, {}).get(node):
                return not_planned, negative, gpus[0], slot_type
        return None

    def _best(self, node: str) -> _Best | None:
        """For a job of no type of the plan."""
        weights = self.board.weights(self.job)
        found = [
            (True, -throughput, gpu, slot_type)
            for gpu, place, slot_type in self.board.by_node.get(node, ())
            if slot_type in self.offered and gpu not in self.board.taken and (throughput := weights[place])
        ]
        return min(found, key=lambda one: one[:3], default=None)


def _question(board: Board, job: Job) -> _Question:
    job_type = board.job_type(job)
    rivals: dict[int, tuple[float, str]] = {}
    for (slot_type, other), amount in board.left.items():
        weight = board.plan.slot_types[slot_type].weights[other]
        if amount > 0 and weight is not None:
            wanted = board.plan.job_types[other].job
            rivals[slot_type] = max(rivals.get(slot_type, (0.0, "")), (weight * wanted.value, wanted.kind))
    return _Question(board, job, job_type, _offered(board, job_type), rivals)


def _offered(board: Board, job_type: int | None) -> dict[int | None, tuple[bool, float | None]]:
    found: dict[int | None, tuple[bool, float | None]] = {}
    if job_type is None:
        found[None] = (False, None)
        found.update({slot_type: (False, None) for slot_type, count in board.spare.items() if count > 0})
        return found
    for slot_type, one in enumerate(board.plan.slot_types):
        planned = board.left.get((slot_type, job_type), 0) > 0
        if one.weights[job_type] is not None and (planned or board.spare[slot_type] > 0):
            found[slot_type] = (planned, one.weights[job_type])
    return found


def choose(board: Board, job: Job, node: str) -> Candidate | None:
    """The GPU of the node that the job gets, if it gets one."""
    best = _question(board, job).best(node)
    if best is None:
        return None
    not_planned, negative, gpu, slot_type = best
    return Candidate(node, gpu, slot_type, not not_planned, -negative)


def filter_nodes(board: Board, job: Job, nodes: Iterable[str]) -> Filtered:
    """Of the scheduler's nodes."""
    question = _question(board, job)
    bests = question.bests()
    found: dict[bool, list[str]] = {True: [], False: []}
    refused: dict[str, str] = {}
    for node in nodes:
        best = bests.get(node)
        if best is None:
            refused[node] = _reason(question, node)
        else:
            found[not best[0]].append(node)
    if found[True]:  # else the scheduler has reasons of its own against the nodes that the plan means
        refused.update(dict.fromkeys(found[False], ELSEWHERE))
    return Filtered(tuple(found[True] or found[False]), refused)


def prioritize(board: Board, job: Job, nodes: Iterable[str]) -> dict[str, int]:
    """Node → score: what the pair is worth less the price of the slot, the best node's being MOST_SCORE."""
    bests = _question(board, job).bests()
    prices = {at: one.price for at, one in enumerate(board.plan.slot_types)}
    gains = {}
    for node in nodes:
        best = bests.get(node)
        price = 0.0 if best is None or best[3] is None else prices[best[3]]
        gains[node] = 0.0 if best is None else max(0.0, -best[1] * job.value - price)
    most = max(gains.values(), default=0.0)
    return {node: round(MOST_SCORE * gain / most) if most > 0 else 0 for node, gain in gains.items()}


def _reason(question: _Question, node: str) -> str:
    """Why the node has no GPU for the job."""
    board, job, rivals = question.board, question.job, question.rivals
    places = board.by_node.get(node, ())
    fitting = [one for one in places if board.plan.slots[one[1]].free_bytes >= job.memory_bytes]
    if not fitting:
        return f"no healthy GPU with {job.memory_bytes / _GIB:.3g} GiB"
    runs = [
        (gpu, slot_type, throughput * job.value)
        for gpu, place, slot_type in fitting
        if (throughput := question.throughput(place, slot_type))
    ]
    if not runs:
        online = ", ".join(sorted({board.plan.slots[place].online or "nothing" for _, place, _ in fitting}))
        return f"cannot run beside {online}, or nothing is known of the pair"
    free = [(slot_type, worth) for gpu, slot_type, worth in runs if gpu not in board.taken]
    if not free:
        return TAKEN
    better = [(*rivals[at], worth) for at, worth in free if at is not None and at in rivals and rivals[at][0] > worth]
    if better:
        worth, kind, mine = max(better)
        return f"worth more to {kind} ({worth:.2f} > {mine:.2f})"
    return ELSEWHERE if any(planned for planned, _ in question.offered.values()) else WAITS
