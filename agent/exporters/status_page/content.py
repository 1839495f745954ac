# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page's content, which /status.json has and page.js draws: a headline, notes, and tables of cells.

Pure. Invariant: every text is printable and of bounded length, whatever a container is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from enum import StrEnum
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerUsage, DeviceReading, DeviceUuid, EnforcementStatus, Snapshot, Unattributed, Usage
from agent.core.text import UTF8, count, joined, label, milliseconds, percent, printable, quantile, size
from agent.exporters.status_page.history import Graph, GraphMetric, GraphSeries, Ring, graph

MOST_ROWS: Final = 200  # of a table: a page of thousands cannot be read
LONGEST: Final = 160  # characters of a text from outside
LATE: Final = 3.0  # intervals, after which the figures are called old
UNKNOWN: Final = UTF8.missing


class CellKind(StrEnum):
    """The kind of a cell or a note; the style sheet has a class for each."""

    TEXT = "text"  # a word or two
    NAME = "name"  # from outside: may be long
    NUMBER = "number"
    DIM = "dim"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Cell:
    """A text, a graph or both."""

    text: str = UNKNOWN
    kind: CellKind = CellKind.TEXT
    graph: Graph | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """`remark` is below it: why it is empty, or what was left out."""

    title: str
    columns: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class PageContent:
    """The whole page."""

    host: str
    headline: str
    notes: tuple[Cell, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision about a container."""

    wall_ns: int
    container: str
    what: str
    why: str
    acted: bool


def page(
    snapshot: Snapshot | None,
    ring: Ring,
    decisions: Sequence[DecisionRow],
    host: str,
    now_ns: int,
    zone: tzinfo | None = None,
) -> PageContent:
    """`now_ns`: CLOCK_REALTIME; decisions come the newest first. Times are in the zone, or the machine's own."""
    if snapshot is None:
        return PageContent(_text(host), "nothing was observed yet")
    tables = (
        _devices(snapshot, ring),
        _promises(snapshot, ring),
        _containers(snapshot, ring),
        _decisions(decisions, snapshot, zone),
    )
    return PageContent(_text(host), _headline(snapshot, ring, zone), tuple(_notes(snapshot, now_ns)), tables)


def _headline(snapshot: Snapshot, ring: Ring, zone: tzinfo | None) -> str:
    mode = "enforcing" if snapshot.enforcing else "deciding, not acting" if snapshot.enforcement else "observing"
    seconds = ring.seconds()
    reach = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    taken = datetime.fromtimestamp(snapshot.wall_ns / NS_PER_SECOND, zone).strftime("%Y-%m-%d %H:%M:%S")
    return f"{mode} · {taken} · graphs: last {reach}"


def _notes(snapshot: Snapshot, now_ns: int) -> list[Cell]:
    found = []
    age = (now_ns - snapshot.wall_ns) / NS_PER_SECOND
    if age > LATE * max(1.0, snapshot.interval_ns / NS_PER_SECOND):
        found.append(
            Cell(f"these figures are {age:.0f} s old: the agent no longer observes; see its log", CellKind.BAD)
        )
    if snapshot.policy_error is not None:
        kept = "the one read before stays in force" if snapshot.policy_wall_ns is not None else "none is in force"
        found += [
            Cell(f"the policy file was refused; {kept}:", CellKind.BAD),
            *(Cell(_text(line, 4 * LONGEST), CellKind.BAD) for line in snapshot.policy_error.split("\n")[:MOST_ROWS]),
        ]
    for health in snapshot.collectors:
        if health.error is not None:
            found.append(Cell(_text(f"{health.name} could not be read: {health.error}", 2 * LONGEST), CellKind.WARN))
    lost = {name: number for name, number in snapshot.lost.items() if number}
    if lost:
        found.append(Cell(_text("lost since the start: " + _counts(lost), 4 * LONGEST), CellKind.WARN))
    return found


def _counts(numbers: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items()))


def _devices(snapshot: Snapshot, ring: Ring) -> Table:
    columns = (_left("GPU"), _left("Model"), *map(_right, ("SM %", "Memory", "PCIe ↑/s", "PCIe ↓/s", "Power", "°C")))
    rows = [_device(reading, snapshot, ring) for reading in snapshot.devices[:MOST_ROWS]]
    return Table("Devices", (*columns, _left("State")), tuple(rows), _left_out(len(snapshot.devices)))


def _device(reading: DeviceReading, snapshot: Snapshot, ring: Ring) -> tuple[Cell, ...]:
    device = reading.device
    memory = f"{size(reading.memory_used_bytes, UTF8)} / {size(device.memory_total_bytes, UTF8)}"
    return (
        Cell(label(device)),
        Cell(_text(device.name + (f" {device.mig_profile}" if device.mig_profile else "")), CellKind.NAME),
        _number(
            percent(reading.sm_activity_ratio, UTF8),
            _ratio_graph(ring, GraphSeries(GraphMetric.SM, device=device.uuid)),
        ),
        _number(memory, _ratio_graph(ring, GraphSeries(GraphMetric.MEMORY, device=device.uuid))),
        _number(size(reading.pcie_tx_bytes_per_second, UTF8)),
        _number(size(reading.pcie_rx_bytes_per_second, UTF8)),
        _number(UNKNOWN if reading.power_watts is None else f"{reading.power_watts:.0f} W"),
        _number(UNKNOWN if reading.temperature_celsius is None else f"{reading.temperature_celsius:.0f}"),
        _state(reading, snapshot),
    )


def _state(reading: DeviceReading, snapshot: Snapshot) -> Cell:
    if reading.lost:
        return Cell("lost: does not answer; see dmesg", CellKind.BAD)
    health = snapshot.health.get(reading.device.uuid)
    if health is None:
        return Cell(kind=CellKind.DIM)
    if health.state in ("init", "healthy"):
        return Cell(health.state, CellKind.GOOD)
    return Cell(
        _text(f"{health.state}: {health.reason}"), CellKind.WARN if health.state == "unhealthy" else CellKind.BAD
    )


def _promises(snapshot: Snapshot, ring: Ring) -> Table:
    columns = (_left("Container"), _left("Rule"), *map(_right, ("Quantile", "Latency", "Target", "Slack")))
    online = [
        (used, status)
        for used in snapshot.containers
        if (status := snapshot.enforcement.get(used.container.key)) is not None and status.target_seconds is not None
    ]
    online.sort(key=lambda entry: (entry[1].slack_ratio is None, entry[1].slack_ratio, entry[0].container.name))
    rows = [_promise(used, status, ring) for used, status in online[:MOST_ROWS]]
    remark = _left_out(len(online)) if online else "no container has one: a policy's online rules make them"
    return Table("Latency promises", (*columns, _left("Kept")), tuple(rows), remark)


def _promise(used: ContainerUsage, status: EnforcementStatus, ring: Ring) -> tuple[Cell, ...]:
    left, target = status.slack_ratio, status.target_seconds
    kind = CellKind.DIM if left is None else CellKind.GOOD if left >= 0 else CellKind.BAD
    points = ring.points(GraphSeries(GraphMetric.LATENCY, used.container.key))
    drawn = graph(points, "latency, and its target across", top=None, level=target)
    return (
        _name(used),
        Cell(_text(status.rule), CellKind.NAME),
        _number(_each(status, _quantile, status.latency_quantile, status.also_quantile)),
        _number(_each(status, _milliseconds, status.latency_seconds, status.also_latency_seconds), drawn),
        _number(_each(status, _milliseconds, target, status.also_target_seconds)),
        Cell(UNKNOWN if left is None else f"{left * 100:.0f} %".replace("-", "−"), CellKind.NUMBER),
        Cell("too few requests" if left is None else "kept" if left >= 0 else "missed", kind),
    )


def _each(
    status: EnforcementStatus, show: Callable[[float | None], str], first: float | None, also: float | None
) -> str:
    """The figure of each quantile of the SLO."""
    return show(first) if status.also_quantile is None else f"{show(first)}, {show(also)}"


def _quantile(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else quantile(ratio)


def _containers(snapshot: Snapshot, ring: Ring) -> Table:
    columns = (_left("Container"), _left("Runtime"), _left("Class"), _left("GPU"), *map(_right, ("SM %", "Memory")))
    enforced = (_right("Share %"), _right("Paused %"), _left("Why"))
    indices = {reading.device.uuid: label(reading.device) for reading in snapshot.devices}
    uses = [(used, usage) for used in snapshot.containers for usage in used.usage]
    uses.sort(key=lambda entry: (-(entry[1].sm_ratio or 0.0), entry[0].container.name))
    shown = sorted(uses[:MOST_ROWS], key=lambda entry: _place(entry[0], snapshot))  # rows that jump cannot be read
    rows = [_use(used, usage, snapshot, indices, ring) for used, usage in shown]
    rows += [_rest(rest, indices) for rest in snapshot.unattributed[:MOST_ROWS]]
    columns = (*columns, _right("Launches/s"), *enforced)
    return Table("Containers", columns, tuple(rows), _left_out(len(uses)) if uses else "no container uses a GPU")


def _place(used: ContainerUsage, snapshot: Snapshot) -> tuple[int, str, str]:
    """Online ones first, then offline ones, each by name."""
    status = snapshot.enforcement.get(used.container.key)
    role = (
        ("online", "offline").index(status.role) if status is not None and status.role in ("online", "offline") else 2
    )
    return role, _name(used).text, used.container.key


def _use(
    used: ContainerUsage, usage: Usage, snapshot: Snapshot, indices: dict[DeviceUuid, str], ring: Ring
) -> tuple[Cell, ...]:
    container = used.container
    status = snapshot.enforcement.get(container.key)
    drawn = _ratio_graph(ring, GraphSeries(GraphMetric.SM, container.key, usage.device))
    return (
        _name(used),
        Cell(_text(container.runtime)),
        Cell(UNKNOWN if status is None else "no rule" if status.role == "unmatched" else _text(status.role)),
        Cell(indices.get(usage.device, "?")),
        _number(percent(usage.sm_ratio, UTF8, usage.sm_provenance), drawn),
        _number(size(usage.memory_bytes, UTF8)),
        _number(count(usage.launches_per_second, UTF8)),
        *_stance(status, _ratio_graph(ring, GraphSeries(GraphMetric.SHARE, container.key))),
    )


def _stance(status: EnforcementStatus | None, drawn: Graph | None) -> tuple[Cell, ...]:
    if status is None:
        return (_number(), _number(), Cell(kind=CellKind.DIM))
    troubles = (f"{rung} failed: {why}" for rung, why in status.troubles.items())
    held = (", ".join(status.rungs),) if status.rungs else ()
    why = "; ".join((*held, *((status.reason,) if status.reason else ()), *troubles))
    kind = CellKind.WARN if status.troubles else CellKind.DIM
    return (
        _number(percent(status.share_ratio, UTF8), drawn),
        _number(percent(status.paused_ratio, UTF8)),
        Cell(_text(why), kind),
    )


def _rest(rest: Unattributed, indices: dict[DeviceUuid, str]) -> tuple[Cell, ...]:
    who = (Cell("(unattributed)", CellKind.DIM), Cell(), Cell())
    use = (_number(percent(rest.sm_ratio, UTF8)), _number(size(rest.memory_bytes, UTF8)), _number())
    return (*who, Cell(indices.get(rest.device, "?")), *use, *_stance(None, None))


def _decisions(decisions: Sequence[DecisionRow], snapshot: Snapshot, zone: tzinfo | None) -> Table:
    columns = (_left("Since"), _left("Container"), _left("Decision"), _left("Why"))
    rows = [
        (
            Cell(datetime.fromtimestamp(decision.wall_ns / NS_PER_SECOND, zone).strftime("%H:%M:%S")),
            Cell(_text(decision.container), CellKind.NAME),
            Cell(_text(decision.what), CellKind.NAME if decision.acted else CellKind.DIM),
            Cell(_text(decision.why, 2 * LONGEST), CellKind.DIM),
        )
        for decision in decisions[:MOST_ROWS]
    ]
    none = "no offline container shares a device with an online one" if snapshot.enforcement else "no policy decides"
    return Table("Recent decisions", columns, tuple(rows), "" if rows else none)


def _name(used: ContainerUsage) -> Cell:
    container = used.container
    return Cell(_text(joined(container.namespace, container.pod, container.name)), CellKind.NAME)


def _text(text: str | None, longest: int = LONGEST) -> str:
    return printable(text, longest) if text else UNKNOWN


def _left(title: str) -> Cell:
    return Cell(title)


def _right(title: str) -> Cell:
    return Cell(title, CellKind.NUMBER)


def _number(text: str = UNKNOWN, drawn: Graph | None = None) -> Cell:
    return Cell(text, CellKind.NUMBER, drawn)


def _ratio_graph(ring: Ring, series: GraphSeries) -> Graph | None:
    return graph(ring.points(series), f"{series.metric} over time, 0 to 100 %")


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{milliseconds(seconds, UTF8)} ms"


def _left_out(number: int) -> str:
    return "" if number <= MOST_ROWS else f"and {number - MOST_ROWS} more: see gputop or /metrics"
