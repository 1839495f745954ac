# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One container as a page: who it is, the last minute in four graphs, its kernels, allocations and decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

from rich.text import Text

from agent.core.model import ContainerKey, ContainerUsage, EnforcementStatus, FunctionUsage, Snapshot
from agent.core.text import Glyphs, count, joined, label, milliseconds, percent, quantile, size, state
from agent.tui.cells import GPU_THRESHOLDS, NO_THRESHOLDS, graph, name, printable
from agent.tui.columns import ROLES
from agent.tui.history import DecisionBlock, Moment, RecentSeries, SnapshotHistory

MOST_KERNELS: Final = 8
TALL_FROM: Final = 36  # lines of the terminal from which graphs are higher
GAP: Final = 2


@dataclass(frozen=True, slots=True)
class Plot:
    """A graph's title, and what it draws; `most` is what fills its height, the largest figure where there is none."""

    title: Text
    series: RecentSeries
    most: float | None = None
    thresholds: tuple[float, float] = NO_THRESHOLDS
    style: str = "cyan"


def container_page(
    snapshot: Snapshot,
    key: ContainerKey,
    history: SnapshotHistory,
    decisions: Sequence[DecisionBlock] | str,
    size_cells: tuple[int, int],
    glyphs: Glyphs,
) -> list[Text]:
    """For a terminal of so many cells. `decisions`: the decisions, or why there are none."""
    width, height = size_cells
    used = next((used for used in snapshot.containers if used.container.key == key), None)
    if used is None:
        return [Text("The container has gone.", style="yellow")]
    status = snapshot.enforcement.get(key)
    lines = [
        _who(used, status, glyphs),
        *_unprobed(used, snapshot),
        *_status(status, snapshot.enforcing, glyphs),
        Text(),
    ]
    lines += _plots(_figures(used, status, history, glyphs), width, 5 if height >= TALL_FROM else 2, glyphs)
    half = max(1, (width - GAP) // 2)
    lines += [Text(), *_beside([_kernels(used.functions, half, glyphs), _memory(used, glyphs)], half)]
    lines += [Text(), *_decisions(decisions, glyphs)]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow=glyphs.overflow)
    return lines


def _who(used: ContainerUsage, status: EnforcementStatus | None, glyphs: Glyphs) -> Text:
    container = used.container
    where = joined(container.runtime, container.namespace, container.pod)
    role, style = ROLES.get(status.role, (status.role, "dim")) if status else ("", "")
    rule = f"  rule {printable(status.rule, glyphs)}" if status and status.rule else ""
    image = f"  {printable(container.image, glyphs)}" if container.image else ""
    return Text.assemble(
        (printable(container.name, glyphs), "bold"),
        "  ",
        (printable(role, glyphs), style),
        rule,
        (f"  {printable(where, glyphs)}{image}", "dim"),
    )


def _unprobed(used: ContainerUsage, snapshot: Snapshot) -> list[Text]:
    """The devices on which it works without launches that are seen."""
    where = [label(one.device) for one in snapshot.devices if used.unprobed.get(one.device.uuid)]
    what = f"unprobed on GPU {', '.join(where)}: it works there by NVML, and its launches are not seen, so none is held"
    return [Text(what, style="bold yellow")] if where else []


def _status(status: EnforcementStatus | None, enforcing: bool, glyphs: Glyphs) -> list[Text]:
    """The state and its reason, then what could not be done."""
    if status is None:
        return []
    word, left = state(status, enforcing), status.slack_ratio
    lines = []
    if word:
        lines.append(Text.assemble((word, "bold" if word == "free" else "bold yellow"), f": {_reason(status, glyphs)}"))
    elif status.periodic is not None:
        lines.append(Text(_reason(status, glyphs)))
    if left is not None:
        fulfilled = ("kept", "green") if left >= 0 else ("missed", "red")
        lines.append(Text.assemble("the promise is ", fulfilled, f", slack {left * 100:+.0f}%", _also(status, glyphs)))
    lines += [
        Text(f"{printable(rung, glyphs)} could not be done: {printable(why, glyphs)}", style="yellow")
        for rung, why in status.troubles.items()
    ]
    return lines


def _also(status: EnforcementStatus, glyphs: Glyphs) -> str:
    """The SLO's second quantile, which has no graph."""
    if status.also_quantile is None:
        return ""
    latency, target = (milliseconds(one, glyphs) for one in (status.also_latency_seconds, status.also_target_seconds))
    return f"; {quantile(status.also_quantile)} {latency} ms, target {target} ms"


def _reason(status: EnforcementStatus, glyphs: Glyphs) -> str:
    return printable(status.reason, glyphs) if status.reason else glyphs.missing


def _figures(
    used: ContainerUsage, status: EnforcementStatus | None, history: SnapshotHistory, glyphs: Glyphs
) -> list[Plot]:
    key = used.container.key
    sm = history.container(key, lambda moment: moment.sm_ratio)
    memory = history.container(key, lambda moment: moment.memory_bytes)
    busiest, largest = f"most {percent(sm.most, glyphs)}%", f"most {size(memory.most, glyphs)}"
    plots = [
        Plot(_title("SM", f"{percent(_last(sm), glyphs)}%", busiest), sm, 1.0, GPU_THRESHOLDS),
        Plot(_title("memory", size(_last(memory), glyphs), largest), memory),
    ]
    if status is not None and status.target_seconds is not None:
        plots.append(_latency(history.container(key, _latency_seconds), status, glyphs))
    if status is not None and status.share_ratio is not None:
        share = _title("share", f"{percent(status.share_ratio, glyphs)}%", "of the device")
        paused = _title("paused", f"{percent(status.paused_ratio, glyphs)}%", "of the time")
        plots += [
            Plot(share, history.container(key, _share_ratio), 1.0),
            Plot(paused, history.container(key, _paused_ratio), 1.0, style="magenta"),
        ]
    return plots


def _latency(series: RecentSeries, status: EnforcementStatus, glyphs: Glyphs) -> Plot:
    """Twice the target fills the graph: what is kept is in its lower half."""
    target = status.target_seconds or 0.0
    title = "latency" if status.latency_quantile is None else quantile(status.latency_quantile)
    now, promised = milliseconds(status.latency_seconds, glyphs), milliseconds(target, glyphs)
    return Plot(_title(title, f"{now} ms", f"target {promised} ms"), series, 2 * target, (0.5, 0.5))


def _latency_seconds(moment: Moment) -> float | None:
    return None if moment.status is None else moment.status.latency_seconds


def _share_ratio(moment: Moment) -> float | None:
    return None if moment.status is None else moment.status.share_ratio


def _paused_ratio(moment: Moment) -> float | None:
    return None if moment.status is None else moment.status.paused_ratio


def _last(series: RecentSeries) -> float | None:
    return series.points[-1][1] if series.points else None


def _title(what: str, figure: str, remark: str) -> Text:
    return Text.assemble((what, "bold"), f" {figure}  ", (remark, "dim"))


def _plots(plots: Sequence[Plot], width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Two beside each other."""
    half = max(1, (width - GAP) // 2)
    blocks = [_plot(plot, half, height, glyphs) for plot in plots]
    lines: list[Text] = []
    for first in range(0, len(blocks), 2):
        lines += _beside(blocks[first : first + 2], half)
    return lines


def _plot(plot: Plot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    style = "" if plot.thresholds != NO_THRESHOLDS else plot.style
    most = plot.most or plot.series.most or 0.0
    return [plot.title, *graph(plot.series.columns(width), height, most, glyphs, plot.thresholds, style)]


def _beside(blocks: Sequence[Sequence[Text]], half: int) -> list[Text]:
    lines = []
    for left, *right in zip_longest(*blocks, fillvalue=Text()):
        line = left.copy()
        line.truncate(half, pad=True)
        lines.append(Text.assemble(line, " " * GAP, *right))
    return lines


def _kernels(functions: Sequence[FunctionUsage], width: int, glyphs: Glyphs) -> list[Text]:
    lines = [Text(f"{'top kernels':<{max(12, width - 23)}}   SM % LNCH/s  EACH", style="bold")]
    ordered = sorted(functions, key=lambda one: -(one.sm_ratio or 0.0))
    for one in ordered[:MOST_KERNELS]:
        title = name(one.name or "(without a name)", glyphs)
        title.truncate(max(12, width - 23), overflow=glyphs.overflow, pad=True)
        figures = f" {percent(one.sm_ratio, glyphs):>6} {count(one.launches_per_second, glyphs):>6}"
        lines.append(Text.assemble(title, figures, f" {_duration(one.gpu_seconds_per_launch, glyphs):>7}"))
    return lines if functions else [*lines, Text("no launch was seen", style="dim")]


def _duration(seconds: float | None, glyphs: Glyphs) -> str:
    if seconds is None:
        return glyphs.missing
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else f"{milliseconds(seconds, glyphs)} ms"


def _memory(used: ContainerUsage, glyphs: Glyphs) -> list[Text]:
    kinds: dict[str, int] = {}
    for usage in used.usage:
        for kind, held in usage.memory_by_kind.items():
            kinds[kind] = kinds.get(kind, 0) + held
    lines = [Text("allocations by kind", style="bold")]
    for kind, held in sorted(kinds.items(), key=lambda item: -item[1]):
        lines.append(Text(f"{printable(kind, glyphs):<12} {size(held, glyphs):>6}"))
    return lines if kinds else [*lines, Text("no allocation was seen", style="dim")]


def _decisions(decisions: Sequence[DecisionBlock] | str, glyphs: Glyphs) -> Iterable[Text]:
    yield Text("last decisions", style="bold")
    if isinstance(decisions, str):
        yield Text(printable(decisions, glyphs), style="dim")
        return
    for one in decisions:
        yield Text(printable(one.head, glyphs))
        for head, text in one.rows:
            yield Text.assemble((f"  {printable(head, glyphs):<5} ", "dim"), printable(text, glyphs))
    if not decisions:
        yield Text("none in the last minute", style="dim")
