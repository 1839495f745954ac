# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which columns fit, and the lines that they make.

Columns are given with a priority; as the terminal narrows the least important go first, and what room is left goes to
the names and to the reason.

The columns of each view, and a line of a list as cells by column key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from rich.text import Text

from agent.core.model import DeviceUuid, EnforcementStatus, Snapshot, Unattributed, Usage
from agent.core.text import Glyphs, count, label, milliseconds, percent, quantile, size, state
from agent.tui.cells import GPU_THRESHOLDS, colour, name
from agent.tui.listing import Line, View

Row = Mapping[str, Text]
GAP: Final = 1


@dataclass(frozen=True, slots=True)
class Column:
    """`width` is the least it needs, `most` what it may grow to. Priority 0 is always shown."""

    key: str
    title: str
    width: int
    priority: int = 0
    most: int = 0
    justify: Literal["left", "right"] = "right"


def fit(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit in `width` cells, in their order, grown to fill it."""
    chosen: list[Column] = []
    for column in sorted(columns, key=lambda column: column.priority):
        if column.priority and _needed([*chosen, column]) > width:
            break
        chosen.append(column)
    ordered = [column for column in columns if column in chosen]
    spare = width - _needed(ordered)
    grown = []
    for column in ordered:
        extra = max(0, min(spare, column.most - column.width))
        spare -= extra
        grown.append(replace(column, width=column.width + extra))
    return grown


def line(columns: Sequence[Column], row: Row, glyphs: Glyphs) -> Text:
    """One row under columns that fit."""
    made = Text(no_wrap=True)
    for column in columns:
        if made:
            made.append(" " * GAP)
        made.append_text(_cell(row.get(column.key), column, glyphs))
    return made


def header(columns: Sequence[Column], glyphs: Glyphs, sorted_by: str = "", reverse: bool = False) -> Text:
    """The titles; the one that is sorted by stands out, with an arrow where there is room for one."""
    titles = {column.key: Text(column.title, style="bold") for column in columns}
    if sorted_by in titles:
        column = next(column for column in columns if column.key == sorted_by)
        arrow = glyphs.rising if reverse else glyphs.falling
        titles[sorted_by] = Text(f"{column.title}{arrow}"[: column.width], style="bold reverse")
    return line(columns, titles, glyphs)


def _cell(cell: Text | None, column: Column, glyphs: Glyphs) -> Text:
    made = cell.copy() if cell is not None else Text()
    made.truncate(column.width, overflow=glyphs.overflow)
    left = column.width - made.cell_len
    if column.justify == "right":
        made.pad_left(left)
    else:
        made.pad_right(left)
    return made


def _needed(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP


USAGE: Final = (
    Column("sm", "SM %", 6),
    Column("memory", "MEM", 6),
    Column("tx", "TX/s", 6, 4),
    Column("rx", "RX/s", 6, 4),
    Column("launches", "LNCH/s", 6, 3),
)

ENFORCEMENT: Final = (
    Column("latency", "LAT/TARGET", 12, 1),
    Column("slack", "SLACK", 5, 2),
    Column("share", "SHARE", 5, 1),
    Column("state", "STATE", 10, 1, 0, "left"),
    Column("reason", "REASON", 16, 7, 80, "left"),
)

CONTAINERS: Final = (
    Column("name", "CONTAINER", 17, 0, 32, "left"),
    Column("where", "RUNTIME/POD", 14, 6, 36, "left"),
    Column("role", "CLASS", 7, 1, 0, "left"),
    Column("gpu", "GPU", 3, 0),
    *USAGE,
    *ENFORCEMENT,
)

PROCESSES: Final = (
    Column("tgid", "PID", 8, 0),
    Column("user", "USER", 8, 4, 12, "left"),
    Column("command", "COMMAND", 14, 0, 60, "left"),
    Column("name", "CONTAINER", 14, 1, 32, "left"),
    Column("gpu", "GPU", 3, 0),
    *USAGE,
)

ROLES: Final = {
    "online": ("online", "cyan"),
    "offline": ("offline", "magenta"),
    "periodic": ("periodic", "blue"),
    "unmatched": ("no rule", "dim"),
}

NOTHING: Final = {
    View.CONTAINER: "no container uses a GPU",
    View.PROCESS: "no process uses a GPU",
    View.GPU: "no GPU found",
}

UNPROBED: Final = "unseen"  # in the place of launches: it works there without any that the probes see

_DEEPER: Final = {"ascii": ("|  ", "   ", "|- ", "`- "), "utf8": ("│  ", "   ", "├─ ", "└─ ")}


def columns(snapshot: Snapshot, view: View) -> tuple[Column, ...]:
    """The columns of a view: those of enforcement only if there is any, headed by the quantile if it is one."""
    if view is View.PROCESS:
        return PROCESSES
    enforced = ("role", *(column.key for column in ENFORCEMENT))
    quantiles = {status.latency_quantile for status in snapshot.enforcement.values()} - {None}
    title = quantile(quantiles.pop() or 0.0) if len(quantiles) == 1 else "LAT"
    return tuple(
        replace(column, title=f"{title}/TARGET") if column.key == "latency" else column
        for column in CONTAINERS
        if snapshot.enforcement or snapshot.enforcing or column.key not in enforced
    )


def row(line: Line, snapshot: Snapshot, view: View, glyphs: Glyphs) -> Row:
    """The cells of a line. Enforcement figures of the whole entry are in its first line only."""
    entry = line.entry
    cells = {} if line.part else _who(line, view, glyphs)
    if entry.status is not None and not line.part:
        cells |= _enforcement(entry.status, snapshot.enforcing, glyphs)
    elif entry.key[0] == "container" and not line.part:
        cells["role"] = Text(glyphs.missing)
    if entry.usage:
        device = entry.usage[line.part].device
        cells |= _usage(entry.usage[line.part], _label(snapshot, device), glyphs)
        if device in entry.unprobed:
            cells["launches"] = Text(UNPROBED, style="bold yellow")
    for cell in cells.values():
        cell.style = cell.style or entry.style
    return cells


def _who(line: Line, view: View, glyphs: Glyphs) -> dict[str, Text]:
    cells = {key: name(text, glyphs) for key, text in line.entry.names.items()}
    if "where" in cells:
        cells["where"].style = "dim"
    if view is not View.PROCESS:
        cells["name"] = Text.assemble((_stem(line.stem, glyphs), "dim"), cells["name"])
    return cells


def _stem(stem: tuple[bool, ...], glyphs: Glyphs) -> str:
    """What leads from an entry to those below it; nothing at the root."""
    past, blank, here, last = _DEEPER["ascii" if glyphs.ascii else "utf8"]
    above = "".join(blank if is_last else past for is_last in stem[1:-1])
    return f"{above}{last if stem[-1] else here}" if len(stem) > 1 else ""


def _enforcement(status: EnforcementStatus, enforcing: bool, glyphs: Glyphs) -> dict[str, Text]:
    role, style = ROLES.get(status.role, (status.role, "dim"))
    left, word = status.slack_ratio, state(status, enforcing)
    missed = "" if left is None else "red" if left < 0 else "green"
    return {
        "role": name(role, glyphs, style),
        "latency": _latency(status.latency_seconds, status.target_seconds, missed, glyphs),
        "slack": Text(glyphs.missing if left is None else f"{left * 100:+.0f}%", style=missed),
        "share": Text(glyphs.missing if status.share_ratio is None else percent(status.share_ratio, glyphs) + "%"),
        "state": name(word, glyphs, "yellow" if word not in (None, "free") else ""),
        "reason": name(status.reason, glyphs, "dim"),
    }


def _latency(seconds: float | None, target: float | None, style: str, glyphs: Glyphs) -> Text:
    if seconds is None and target is None:
        return Text(glyphs.missing)
    return Text(f"{milliseconds(seconds, glyphs)}/{milliseconds(target, glyphs)}ms", style=style)


def _usage(usage: Usage | Unattributed, where: str, glyphs: Glyphs) -> dict[str, Text]:
    cells = {
        "gpu": Text(where),
        "memory": Text(size(usage.memory_bytes, glyphs)),
        "tx": Text(size(usage.pcie_tx_bytes_per_second, glyphs)),
        "rx": Text(size(usage.pcie_rx_bytes_per_second, glyphs)),
    }
    if isinstance(usage, Unattributed):
        return {**cells, "sm": Text(percent(usage.sm_ratio, glyphs))}
    figure = percent(usage.sm_ratio, glyphs, usage.sm_provenance)
    return {
        **cells,
        "sm": Text(figure, style=colour(usage.sm_ratio, GPU_THRESHOLDS)),
        "launches": Text(count(usage.launches_per_second, glyphs)),
    }


def _label(snapshot: Snapshot, uuid: DeviceUuid) -> str:
    return next((label(reading.device) for reading in snapshot.devices if reading.device.uuid == uuid), "?")
