# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rows of the three views, as cells by column key.

Every view ends each device with what is unattributed, so that a column adds up to the device's figure in the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from rich.text import Text

from agent.model import Container, DeviceUuid, Enforcement, Snapshot, Unattributed, Usage
from agent.tui.cells import GPU_THRESHOLDS, Glyphs, colour, count, name, percent, size
from agent.tui.columns import Column, Row

USAGE: Final = (
    Column("sm", "SM %", 6),
    Column("memory", "MEM", 6),
    Column("tx", "TX/s", 6, 3),
    Column("rx", "RX/s", 6, 3),
    Column("launches", "LNCH/s", 6, 2),
)
ENFORCEMENT: Final = (
    Column("latency", "LAT/TARGET", 12, 1),
    Column("share", "SHARE", 5, 1),
    Column("paused", "PAUSED", 6, 4),
    Column("reason", "REASON", 16, 6, 80, "left"),
)
CONTAINERS: Final = (
    Column("name", "CONTAINER", 14, 0, 32, "left"),
    Column("where", "RUNTIME/POD", 14, 5, 36, "left"),
    Column("role", "CLASS", 7, 1, 0, "left"),
    Column("gpu", "GPU", 3, 0),
    *USAGE,
    *ENFORCEMENT,
)
ROLES: Final = {"online": ("online", "cyan"), "offline": ("offline", "magenta"), "unmatched": ("no rule", "dim")}
HELD: Final = {"freeze": "frozen", "lock": "locked", "swap": "swapped", "evict": "evicted"}  # the mildest first
PROCESSES: Final = (
    Column("tgid", "PID", 8, 0),
    Column("user", "USER", 8, 4, 12, "left"),
    Column("command", "COMMAND", 14, 0, 60, "left"),
    Column("name", "CONTAINER", 14, 1, 32, "left"),
    Column("gpu", "GPU", 3, 0),
    *USAGE,
)


def container_columns(snapshot: Snapshot) -> list[Column]:
    """The columns of containers: those of enforcement only if there is any, headed by the quantile if it is one."""
    enforced = ("role", *(column.key for column in ENFORCEMENT))
    quantiles = {said.latency_quantile for said in snapshot.enforcement.values()} - {None}
    title = f"p{quantiles.pop() or 0:.4%}".rstrip("0%").rstrip(".") if len(quantiles) == 1 else "LAT"
    return [
        replace(column, title=f"{title}/TARGET") if column.key == "latency" else column
        for column in CONTAINERS
        if snapshot.enforcement or column.key not in enforced
    ]


def by_container(snapshot: Snapshot, glyphs: Glyphs) -> list[Row]:
    """One row per container and device, the busiest container first; then what is unattributed."""
    found: list[tuple[float, str, list[Row]]] = []
    for used in snapshot.containers:
        who = _who(used.container, snapshot.enforcement.get(used.container.key), glyphs)
        mine = [{**who, **_usage(usage, _index(snapshot, usage.device), glyphs)} for usage in used.usage]
        busy = sum(usage.sm_ratio or 0 for usage in used.usage)
        found.append((-busy, used.container.name, [*mine[:1], *map(_without_name, mine[1:])] or [who]))
    rows = [row for _, _, rows in sorted(found, key=lambda entry: entry[:2]) for row in rows]
    return rows + [_unattributed(rest, snapshot, glyphs) for rest in snapshot.unattributed]


def by_process(snapshot: Snapshot, glyphs: Glyphs) -> list[Row]:
    """One row per process and device, the busiest first; then what is unattributed."""
    names = {used.container.key: used.container.name for used in snapshot.containers}
    found: list[tuple[float, int, Row]] = []
    for used in snapshot.processes:
        process = used.process
        who = {
            "tgid": Text(str(process.id.tgid)),
            "user": name(process.user, glyphs),
            "command": name(process.command, glyphs),
            "name": name(names.get(process.container, process.container), glyphs),
        }
        for usage in used.usage:
            cells = _usage(usage, _index(snapshot, usage.device), glyphs)
            found.append((-(usage.sm_ratio or 0), process.id.tgid, {**who, **cells}))
    rows = [row for _, _, row in sorted(found, key=lambda entry: entry[:2])]
    rest = [_unattributed(rest, snapshot, glyphs) for rest in snapshot.unattributed]
    return rows + [{**row, "command": row["name"], "name": Text()} for row in rest]


def by_gpu(snapshot: Snapshot, glyphs: Glyphs) -> list[Row]:
    """The containers of each device under a line of its own, each device ended by what is unattributed."""
    rows: list[Row] = []
    for reading in snapshot.devices:
        uuid = reading.device.uuid
        title = Text.assemble("GPU ", str(reading.device.index), " ", name(reading.device.name, glyphs))
        rows.append({"name": Text(title.plain, style="bold"), "where": name(uuid, glyphs, "dim")})
        here = [(usage, used.container) for used in snapshot.containers for usage in used.usage if usage.device == uuid]
        for usage, container in sorted(here, key=lambda entry: (-(entry[0].sm_ratio or 0), entry[1].name)):
            who = _who(container, snapshot.enforcement.get(container.key), glyphs)
            rows.append({**who, **_usage(usage, str(reading.device.index), glyphs)})
        rows += [_unattributed(rest, snapshot, glyphs) for rest in snapshot.unattributed if rest.device == uuid]
    return rows


def _who(container: Container, enforcement: Enforcement | None, glyphs: Glyphs) -> dict[str, Text]:
    where = [container.runtime, *filter(None, (container.namespace, container.pod))]
    cells = {
        "name": name(container.name, glyphs),
        "where": name("/".join(where), glyphs, "dim"),
        "role": Text(glyphs.missing),
    }
    return cells if enforcement is None else {**cells, **_enforcement(enforcement, glyphs)}


def _enforcement(said: Enforcement, glyphs: Glyphs) -> dict[str, Text]:
    role, style = ROLES.get(said.role, (said.role, "dim"))
    return {
        "role": name(role, glyphs, style),
        "latency": _latency(said.latency_seconds, said.target_seconds, glyphs),
        "share": Text(glyphs.missing if said.share_ratio is None else percent(said.share_ratio, glyphs) + "%"),
        "paused": _paused(said, glyphs),
        "reason": name(said.reason, glyphs, "dim"),
    }


def _paused(said: Enforcement, glyphs: Glyphs) -> Text:
    """The strongest rung where there is one: how often it was stopped besides says little then."""
    held = [word for rung, word in HELD.items() if rung in said.rungs]
    if held:
        return name(held[-1], glyphs, "yellow")
    return Text(glyphs.missing if said.paused_ratio is None else percent(said.paused_ratio, glyphs) + "%")


def _latency(seconds: float | None, target: float | None, glyphs: Glyphs) -> Text:
    if seconds is None and target is None:
        return Text(glyphs.missing)
    style = "" if seconds is None or target is None else "red" if seconds > target else "green"
    return Text(f"{_milliseconds(seconds, glyphs)}/{_milliseconds(target, glyphs)}ms", style=style)


def _milliseconds(seconds: float | None, glyphs: Glyphs) -> str:
    if seconds is None:
        return glyphs.missing
    return f"{seconds * 1e3:.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _usage(usage: Usage, index: str, glyphs: Glyphs) -> dict[str, Text]:
    return {
        "gpu": Text(index),
        "sm": Text(percent(usage.sm_ratio, glyphs, usage.sm_provenance), style=colour(usage.sm_ratio, GPU_THRESHOLDS)),
        "memory": Text(size(usage.memory_bytes, glyphs)),
        "launches": Text(count(usage.launches_per_second, glyphs)),
        **_flows(usage, glyphs),
    }


def _unattributed(rest: Unattributed, snapshot: Snapshot, glyphs: Glyphs) -> Row:
    cells: Mapping[str, Text] = {
        "name": Text("(unattributed)"),
        "gpu": Text(_index(snapshot, rest.device)),
        "sm": Text(percent(rest.sm_ratio, glyphs)),
        "memory": Text(size(rest.memory_bytes, glyphs)),
        **_flows(rest, glyphs),
    }
    for cell in cells.values():
        cell.style = "italic dim"
    return cells


def _flows(rate: Usage | Unattributed, glyphs: Glyphs) -> dict[str, Text]:
    return {
        "tx": Text(size(rate.pcie_tx_bytes_per_second, glyphs)),
        "rx": Text(size(rate.pcie_rx_bytes_per_second, glyphs)),
    }


def _index(snapshot: Snapshot, uuid: DeviceUuid) -> str:
    indices = (str(reading.device.index) for reading in snapshot.devices if reading.device.uuid == uuid)
    return next(indices, "?")


def _without_name(row: Row) -> Row:
    return {key: cell for key, cell in row.items() if key in ("gpu", *(column.key for column in USAGE))}
