# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench probes`: what a probe costs on the functions of NVIDIA's own libraries and of the simulated ones.

A call of cuLaunchKernel, which ends at once as the driver is not initialised: without a probe, with an empty program on
its first instruction, with one where the agent's probe stands, with that and one at the return, and with the agent's
own program. Each round measures all of them in one process, the fastest of several loops of each, as all that disturbs
makes them slower. It holds when a probe costs at most a fifth of one at the entry, in the median of the rounds, on each
library that begins with an instruction that the kernel single-steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from agent.node import preflight
from agent.node.instructions import AT_ENTRY, EntryInstruction
from agent.node.procfs import Procfs
from agent.probes.attachment import ProbedFunction
from agent.probes.libbpf import BpfObject, load_uprobes
from agent.probes.libcuda import LibcudaProbes
from tools.harness.library_caller import LibraryCaller
from tools.harness.node import BUILD
from tools.harness.uprobes import MEASURING, agents_functions, attached

FUNCTION: Final = "cuLaunchKernel"
MOST_RATIO: Final = 0.2
_DRIVERS: Final = Path(__file__).resolve().parents[2] / "build" / "driver"  # `make driver-binaries`
_COLUMNS: Final = ("bare_us", "at_entry_us", "at_place_us", "at_place_with_return_us", "watched_us")
_LOOPS, _CALLS = 5, 4000


def libraries() -> dict[str, Path]:
    """By name: the real ones that were fetched, and the simulated ones."""
    real = sorted(_DRIVERS.glob("*/usr/lib/*/nvidia/current/libcuda.so.1"))
    return {
        **{path.relative_to(_DRIVERS).parts[0]: path.resolve() for path in real},
        "simulated": BUILD / "lib" / "libcuda.so.1",
        "simulated, plain": BUILD / "plain" / "libcuda.so.1",
    }


def one_function(descriptor: int, *, at_entry: bool, returns: bool) -> list[ProbedFunction]:
    """An empty program on FUNCTION, as the agent would place it or on its first instruction."""
    functions = agents_functions(descriptor, "empty", at_entry=at_entry)
    (found,) = (function for function in functions if function.name == FUNCTION)
    return [replace(found, at_return="empty" if returns else None)]


def _watched(library: Path) -> AbstractContextManager[Any]:
    probes = LibcudaProbes(preflight.bpf_object(), Procfs())
    probes.ensure(str(library))
    return probes


def costs(caller: LibraryCaller, bpf: BpfObject, library: Path) -> dict[str, float]:
    """Microseconds per call, one round."""
    probed = partial(attached, bpf, library)
    ways: dict[str, AbstractContextManager[Any]] = {
        "bare_us": nullcontext(),
        "at_entry_us": probed(partial(one_function, at_entry=True, returns=False)),
        "at_place_us": probed(partial(one_function, at_entry=False, returns=False)),
        "at_place_with_return_us": probed(partial(one_function, at_entry=False, returns=True)),
    }
    found = {}
    for name, way in ways.items():
        with way:
            found[name] = _fastest(caller)
    with _watched(library):
        found["watched_us"] = _fastest(caller)
    return found


def _fastest(caller: LibraryCaller) -> float:
    return min(caller.call(FUNCTION, _CALLS)[1] for _ in range(_LOOPS))


def measured(library: Path, rounds: int) -> Iterator[dict[str, float]]:
    """Rounds on a copy of the library, which no other program's probes are on."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuwarden-probes-")))
        copy = folder / "libcuda.so.1"
        shutil.copyfile(library, copy)
        caller = stack.enter_context(LibraryCaller())
        caller.open(copy)
        bpf = stack.enter_context(load_uprobes(MEASURING / "empty.bpf.o", {"empty"}))
        for _ in range(rounds):
            yield costs(caller, bpf, copy)


def row(name: str, library: Path, rounds: int) -> dict[str, Any]:
    """Medians of the rounds, with least and most."""
    with library.open("rb") as file:
        (function,) = one_function(file.fileno(), at_entry=False, returns=False)
    found = list(measured(library, rounds))
    figures = {column: [one[column] for one in found] for column in _COLUMNS}
    return {
        "library": name,
        "place": function.place.distance,
        "instruction": str(function.place.instruction or "unknown"),
        **{column: round(median(values), 3) for column, values in figures.items()},
        "range_us": {column: [round(min(values), 3), round(max(values), 3)] for column, values in figures.items()},
        "at_place_per_at_entry": round(median(one["at_place_us"] / one["at_entry_us"] for one in found), 3),
        "rounds": rounds,
    }


def holds(one: dict[str, Any]) -> bool:
    """Whether the probe is cheap, where it can be cheaper than at the entry."""
    cheap = one["instruction"] == EntryInstruction.EMULATED
    return bool(one["place"] == AT_ENTRY.distance or (cheap and one["at_place_per_at_entry"] <= MOST_RATIO))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Of all libraries."""
    made = Table("library", "probe at", *_COLUMNS, "place / entry", title=f"{FUNCTION}, µs per call (least to most)")
    for one in rows:
        ranges = ((one[column], *one["range_us"][column]) for column in _COLUMNS)
        figures = (f"{middle:.2f} ({least:.2f}–{most:.2f})" for middle, least, most in ranges)
        place = f"+{one['place']}, {one['instruction']}"
        made.add_row(one["library"], place, *figures, f"{one['at_place_per_at_entry']:.2f}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when probes are cheap on every library."""
    parser = argparse.ArgumentParser(prog="python -m bench probes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    rows = [row(name, library, options.rounds) for name, library in libraries().items()]
    Console(width=150).print(table(rows))
    for one in rows:
        added_us = one["watched_us"] - one["at_place_us"]
        print(f"{one['library']}: the agent's program adds {added_us:.2f} µs to an empty one")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    if missing := {"535", "550", "555"} - {one["library"] for one in rows}:
        print(f"not measured: {', '.join(sorted(missing))}: run `make driver-binaries`")
    return 0 if all(map(holds, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
