# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The columns of each view, and a line of a list as cells by column key."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rich.text import Text

from agent.model import DeviceUuid, Enforcement, Snapshot, Unattributed, Usage
from agent.tui.cells import GPU_THRESHOLDS, Glyphs, colour, count, label, milliseconds, name, percent, quantile, size
from agent.tui.columns import Column, Row
from agent.tui.entries import View
from agent.tui.order import Line
from agent.tui.throttle import slack, state

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
ROLES: Final = {"online": ("online", "cyan"), "offline": ("offline", "magenta"), "unmatched": ("no rule", "dim")}
NOTHING: Final = {
    View.CONTAINER: "no container uses a GPU",
    View.PROCESS: "no process uses a GPU",
    View.GPU: "no GPU found",
}
_DEEPER: Final = {"ascii": ("|  ", "   ", "|- ", "`- "), "utf8": ("│  ", "   ", "├─ ", "└─ ")}


def columns(snapshot: Snapshot, view: View) -> tuple[Column, ...]:
    """The columns of a view: those of enforcement only if there is any, headed by the quantile if it is one."""
    if view is View.PROCESS:
        return PROCESSES
    enforced = ("role", *(column.key for column in ENFORCEMENT))
    quantiles = {said.latency_quantile for said in snapshot.enforcement.values()} - {None}
    title = quantile(quantiles.pop() or 0.0) if len(quantiles) == 1 else "LAT"
    return tuple(
        replace(column, title=f"{title}/TARGET") if column.key == "latency" else column
        for column in CONTAINERS
        if snapshot.enforcement or snapshot.enforcing or column.key not in enforced
    )


def row(line: Line, snapshot: Snapshot, view: View, glyphs: Glyphs) -> Row:
    """The cells of a line. What is said of the whole entry stands in its first line only."""
    entry = line.entry
    cells = {} if line.part else _who(line, view, glyphs)
    if entry.said is not None and not line.part:
        cells |= _enforcement(entry.said, snapshot.enforcing, glyphs)
    elif entry.key[0] == "container" and not line.part:
        cells["role"] = Text(glyphs.missing)
    if entry.usage:
        cells |= _usage(entry.usage[line.part], _label(snapshot, entry.usage[line.part].device), glyphs)
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


def _enforcement(said: Enforcement, enforcing: bool, glyphs: Glyphs) -> dict[str, Text]:
    role, style = ROLES.get(said.role, (said.role, "dim"))
    left, word = slack(said), state(said, enforcing)
    missed = "" if left is None else "red" if left < 0 else "green"
    return {
        "role": name(role, glyphs, style),
        "latency": _latency(said.latency_seconds, said.target_seconds, missed, glyphs),
        "slack": Text(glyphs.missing if left is None else f"{left * 100:+.0f}%", style=missed),
        "share": Text(glyphs.missing if said.share_ratio is None else percent(said.share_ratio, glyphs) + "%"),
        "state": name(word, glyphs, "yellow" if word not in (None, "free") else ""),
        "reason": name(said.reason, glyphs, "dim"),
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
