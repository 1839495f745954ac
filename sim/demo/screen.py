# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The demo's output: the phase, gputop while it runs, and the table at the end."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent.core.model import Snapshot
from agent.tui import View, render
from sim.demo.figures import Figures
from tools.harness.quiet import STOLEN_RATIO

_PLAIN_SECONDS = 5.0


class Screen:
    """A live picture on a terminal, plain lines elsewhere."""

    def __init__(self, *, plain: bool) -> None:
        self._console = Console(soft_wrap=plain, width=110 if plain else None)
        self._live = None if plain else Live(console=self._console, auto_refresh=False)
        self._title = ""
        self._shown = 0.0
        self._number = 0

    def phase(self, name: str, remark: str) -> None:
        """A new phase begins."""
        self._title = f"{name}{f' ({remark})' if remark else ''}"
        self._shown = 0.0
        if self._live is None:
            self._console.print(f"── {self._title}")
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._heading(), refresh=True)

    def show(self, snapshot: Snapshot) -> None:
        """The newest snapshot."""
        body = render(snapshot, View.CONTAINER)
        if self._live is not None:
            self._live.update(Group(self._heading(), body), refresh=True)
        elif time.monotonic() - self._shown >= _PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._console.print(body)

    def end(self) -> None:
        """Restores the terminal."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def table(self, figures: Figures) -> None:
        """Shows the figures as a table."""
        self.end()
        self._console.print(outcome(figures))

    def _heading(self) -> RenderableType:
        return Text(f"GPU Warden demo: {self._title}", style="bold")


def outcome(figures: Figures) -> Table:
    """One row per phase, to alone where that says more."""
    table = Table(title="GPU Warden on a simulated GPU: one online service, one training job", title_style="bold")
    for heading in ("", "online p50", "online p99", "p99 to alone", "offline throughput to alone"):
        table.add_column(heading, justify="left" if not heading else "right")
    p50, p99, offline = figures.online_p50_ms, figures.online_p99_ms, figures.offline_throughput_ratio
    for name, title in (("alone", "each alone"), ("uncontrolled", "both, uncontrolled"), ("controlled", "both, held")):
        share = 1.0 if name == "alone" else offline[name]
        table.add_row(
            title, f"{p50[name]:.1f} ms", f"{p99[name]:.1f} ms", f"{p99[name] / p99['alone']:.2f}×", f"{share:.0%}"
        )
    error, missed = figures.attribution_error_ratio, figures.launches_missed
    caption = (
        f"left over by the online service: {figures.left_over_ratio:.0%} · requests per phase: {figures.requests} · "
        f"attribution error: {'–' if error is None else f'{error:.1%}'} · "
        f"launches missed: {'–' if missed is None else missed} · pauses: {figures.pauses}"
    )
    if figures.stolen_ratio > STOLEN_RATIO:
        caption += (
            f"\nthe hypervisor took {figures.stolen_ratio:.0%} of this machine's CPU time meanwhile, without which the "
            "simulated GPU is late: these figures say little, run it again on a quiet machine"
        )
    table.caption = caption
    return table
