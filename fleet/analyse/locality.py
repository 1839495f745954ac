# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What spreading a job over servers goes with: its queueing delay (Philly's Fig. 4) and its GPUs' utilisation.

Utilisation is a mean weighted by GPU time, as Philly's Tables 3 and 4 are of samples by the minute. Only jobs for which
the trace tells it count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from fleet.analyse.tables import (
    Absent,
    Cell,
    Column,
    Table,
    by_size,
    delays_s,
    grouped,
    quantile,
    table,
)
from fleet.model import TraceJob

_GPUS: Final = Column("gpus", "GPUs")
_SERVERS: Final = Column("servers", "servers")
_JOBS: Final = Column("jobs", "jobs")
_UTILISATION: Final = Column("utilisation_percent", "mean utilisation %", 2)


def delays(jobs: Sequence[TraceJob]) -> Table | Absent:
    """Delay by size and servers, of jobs with more than one GPU: others are always on one server."""
    title = "Queueing delay by size and servers (Philly's Fig. 4)"
    placed = [job for job in jobs if job.servers is not None and job.start_s is not None and job.gpus > 1]
    if not placed:
        return Absent("locality", title, "servers and starts of jobs with several GPUs")
    columns = (_GPUS, _SERVERS, _JOBS, Column("delay_p50_s", "p50 s"), Column("delay_p90_s", "p90 s"))
    rows: list[tuple[Cell, ...]] = []
    for size, members in by_size(placed).items():
        for servers, alike in sorted(grouped(members, lambda job: job.servers or 0).items()):
            waits_s = delays_s(alike)
            rows.append((size, str(servers), len(alike), quantile(waits_s, 0.5), quantile(waits_s, 0.9)))
    return table("locality", title, columns, rows)


def utilisation(jobs: Sequence[TraceJob]) -> Table | Absent:
    """By number of GPUs (Philly's Fig. 5, Table 3)."""
    title = "Utilisation of allocated GPUs by size (Philly's Fig. 5, Table 3)"
    known = _measured(jobs)
    if not known:
        return Absent("utilisation", title, "utilisation")
    rows: list[tuple[Cell, ...]] = [("all", len(known), _mean_percent(known))]
    for gpus, members in sorted(grouped(known, lambda job: job.gpus).items()):
        rows.append((f"{gpus:g}", len(members), _mean_percent(members)))
    return table("utilisation", title, (_GPUS, _JOBS, _UTILISATION), rows)


def spread(jobs: Sequence[TraceJob]) -> Table | Absent:
    """By number of GPUs and of servers (Philly's Fig. 6, Table 4); traces do not tell which servers were dedicated."""
    title = "Utilisation of allocated GPUs by size and servers (Philly's Fig. 6, Table 4)"
    known = [job for job in _measured(jobs) if job.servers is not None and job.gpus > 1]
    if not known:
        return Absent("spread", title, "utilisation and servers of jobs with several GPUs")
    rows: list[tuple[Cell, ...]] = [
        (f"{gpus:g}", str(servers), len(members), _mean_percent(members))
        for (gpus, servers), members in sorted(grouped(known, lambda job: (job.gpus, job.servers or 0)).items())
    ]
    return table("spread", title, (_GPUS, _SERVERS, _JOBS, _UTILISATION), rows)


def _measured(jobs: Sequence[TraceJob]) -> list[TraceJob]:
    return [job for job in jobs if job.utilisation is not None and job.gpu_seconds]


def _mean_percent(jobs: Sequence[TraceJob]) -> float:
    weights = [job.gpu_seconds or 0.0 for job in jobs]
    sums = math.fsum((job.utilisation or 0.0) * weight for job, weight in zip(jobs, weights, strict=True))
    return 100 * sums / math.fsum(weights)
