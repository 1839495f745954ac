# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Traces of GPU clusters: the formats that can be read, and the one place where a trace's file is opened.

A format is one module with `jobs(text, dropped)`: it reads from an open file as it goes, yields what it understands and
counts by reason what it does not, so one bad row never costs a trace. Data of others are not shipped: a format says
where its data are, under which licence, and how to get them.
"""

from __future__ import annotations

import gzip
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from fleet.model import FleetError, Trace, TraceJob
from fleet.traces import helios, muri, openb, philly_csv, philly_log, pollux

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Reader = Callable[[TextIO, Counter[str]], Iterator[TraceJob]]
"""An open file → its jobs, in the file's order; adds the reasons of rows that hold no job to the counter."""
Progress = Callable[[int, int], None]
"""Is called with the bytes read so far and the file's size."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of traces, and where data in it come from."""

    read: Reader
    summary: str
    source: str
    licence: str
    fetch: str
    """Shell command that puts the file into the working directory"""


_GITHUB: Final = "https://raw.githubusercontent.com"

FORMATS: Final[Mapping[str, Format]] = {
    "philly_csv": Format(
        read=philly_csv.jobs,
        summary="Philly's jobs as a table: submission, length, GPUs, virtual cluster",
        source="https://github.com/petuum/adaptdl/tree/osdi21-artifact/simulator/traces",
        licence="CC BY 4.0 (derives from Philly; the branch itself names no licence)",
        fetch=f"curl -LO {_GITHUB}/petuum/adaptdl/osdi21-artifact/simulator/traces/philly.csv",
    ),
    "philly_log": Format(
        read=philly_log.jobs,
        summary="Philly's own job log: also status, every attempt, delay and servers",
        source="https://github.com/msr-fiddle/philly-traces",
        licence="CC BY 4.0",
        fetch="git lfs install && git clone https://github.com/msr-fiddle/philly-traces "
        "&& tar -xzf philly-traces/trace-data.tar.gz",
    ),
    "helios": Format(
        read=helios.jobs,
        summary="Helios of SenseTime: status, delay, servers",
        source="https://github.com/S-Lab-System-Group/HeliosData",
        licence="CC BY 4.0",
        fetch="curl -LO https://github.com/S-Lab-System-Group/HeliosData/raw/master/data.zip && unzip data.zip",
    ),
    "openb": Format(
        read=openb.jobs,
        summary="Alibaba's pods of 2023: parts of a GPU, online and offline, delay",
        source="https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023",
        licence="none named",
        fetch=f"curl -LO {_GITHUB}/alibaba/clusterdata/master/cluster-trace-gpu-v2023/csv/openb_pod_list_default.csv",
    ),
    "muri": Format(
        read=muri.jobs,
        summary="Muri's cluster trace: arrivals of Philly's jobs, with a model and its times by resource",
        source="https://github.com/Rivendile/Muri/tree/main/cluster_exp/trace-data",
        licence="Apache-2.0",
        fetch=f"curl -LO {_GITHUB}/Rivendile/Muri/main/cluster_exp/trace-data/cluster_trace.csv",
    ),
    "pollux": Format(
        read=pollux.jobs,
        summary="Pollux's workloads: submission, application, replicas; no lengths",
        source="https://github.com/petuum/adaptdl/tree/osdi21-artifact/simulator/workloads",
        licence="none named on the branch (Apache-2.0 on master)",
        fetch=f"curl -LO {_GITHUB}/petuum/adaptdl/osdi21-artifact/simulator/workloads/workload-6.csv",
    ),
}
"""Name → format"""


def read_trace(path: Path, name: str, progress: Progress | None = None) -> Trace:
    """All jobs of a file, by time of submission; a file whose name ends in .gz is unpacked on the way.

    FleetError: there is no such format, the file cannot be read, or it is of another format.
    """
    if name not in FORMATS:
        raise FleetError(f"no format is called {name!r}; there are: {', '.join(FORMATS)}")
    dropped: Counter[str] = Counter()
    try:
        with _opened(path, progress) as text:
            jobs = sorted(FORMATS[name].read(text, dropped), key=lambda job: job.submit_s)
    except FleetError as error:
        raise FleetError(f"{path} is not in the format {name}: {error}. `gpuwarden fleet formats` lists all") from error
    except (OSError, EOFError) as error:  # EOFError: a .gz that ends too early
        raise FleetError(f"cannot read {path}: {error}") from error
    return Trace(tuple(jobs), dropped)


@contextmanager
def _opened(path: Path, progress: Progress | None) -> Iterator[TextIO]:
    with path.open("rb", buffering=0) as file:
        raw: io.RawIOBase = file if progress is None else _Counted(file, path.stat().st_size, progress)
        buffered = io.BufferedReader(raw, 1 << 20)
        binary = gzip.GzipFile(fileobj=buffered) if path.suffix == ".gz" else buffered
        # A byte that is no UTF-8 spoils one name, not the trace.
        with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="replace", newline="") as text:
            yield text


class _Counted(io.RawIOBase):
    """A file that says how far it has been read."""

    def __init__(self, file: io.FileIO, size_bytes: int, progress: Progress) -> None:
        self._file, self._size_bytes, self._progress = file, size_bytes, progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        count = self._file.readinto(buffer)
        self._progress(self._file.tell(), self._size_bytes)
        return count
