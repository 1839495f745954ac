# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether programs call the driver library where its probes stand, and what a probe there costs.

cuGetProcAddress may give out other addresses than the library exports: inner ones would be called past every probe.
It has a form of a call for each version of CUDA that brought one, so all versions are asked for.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, failed

if TYPE_CHECKING:
    from agent.node.elf import Extent
    from agent.node.instructions import ProbePlace

TITLE: Final = "Where programs enter the driver library, and what a probe costs there"
SECONDS: Final = 15
ITEM: Final = "exports"
WHAT: Final = (
    "probed symbols that libcuda exports",
    "newer versions of probed calls that no probe knows",
    "dlsym gives the exported functions",
    "cuGetProcAddress gives exported functions",
    "{symbol}: cuGetProcAddress gives no export",
    "cuGetProcAddress gives functions that are probed",
    "{symbol}: cuGetProcAddress gives an unprobed export",
    "per-thread default streams: cuGetProcAddress gives the functions with _ptsz or _ptds",
    "probed exports that cuGetProcAddress gives for no version",
    "first instruction: emulated",
    "first instruction: single-stepped",
    "first instruction: refused",
    "first instruction: unknown",
    "{symbol}: first bytes",
    "probes on an instruction that the kernel emulates",
    "bytes from a function's first to its probe",
)
_PROGRAM: Final = Path(__file__).resolve().parents[1] / "programs" / "addresses.py"
# In which a form of a probed call came, and the last of each series of CUDA.
_VERSIONS: Final = (
    *(2000, 2010, 2020, 2030, 3000, 3010, 3020, 4000, 4010, 4020, 5000, 5050, 6000, 6050, 7000, 7050, 8000),
    *(9000, 9010, 9020, 10000, 10010, 10020),
    *range(11000, 11090, 10),
    *range(12000, 12100, 10),
    *range(13000, 13100, 10),
)
_FORM: Final = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
_OF_THREAD: Final = ("_ptsz", "_ptds")
_SHOWN: Final = re.compile(r"cu(LaunchKernel|LaunchKernelEx|GraphLaunch|MemAlloc_v2|MemcpyAsync|StreamSynchronize)")
_MOST_NAMES: Final = 40  # in a note


@dataclass(frozen=True, slots=True)
class ProcAddress:
    """One answer of cuGetProcAddress. `place`: the offset in the library's file, or what else is there."""

    name: str
    flag: str
    version: int
    place: int | str


def rows(host: Host) -> Iterator[Row]:
    """Needs a driver library, and no right to probe it."""
    from agent.node.elf import exported_extents
    from agent.node.instructions import places
    from agent.probes.symbols import SYMBOLS

    if host.libcuda is None:
        raise Unavailable("there is no libcuda.so.1 on this machine")
    extents = exported_extents(str(host.libcuda), "cu")
    exports = {name: extent.offset for name, extent in extents.items()}
    probed = [symbol.name for symbol in SYMBOLS]
    yield from symbol_rows(exports, probed)
    probed_extents = {name: extents[name] for name in probed if name in extents}
    yield from entry_rows(host.libcuda, probed_extents)
    yield from place_rows(probed_extents, places(str(host.libcuda), extents.values()))
    answer = _asked(host, host.libcuda, sorted(exports), bases(probed))
    if isinstance(answer, str):
        yield failed(ITEM, "cuGetProcAddress gives exported functions", answer)
        return
    yield linked_row(exports, answer["linked"])
    yield from pointer_rows(exports, probed, [ProcAddress(**one) for one in answer["asked"]], answer["version"])


def bases(names: Sequence[str]) -> list[str]:
    """What programs ask for: names without version and kind of stream."""
    return sorted({_FORM.sub("", name) for name in names})


def _asked(host: Host, libcuda: Path, exports: Sequence[str], names: Sequence[str]) -> Any:
    """The program's answer, or why there is none."""
    question = json.dumps({"exports": exports, "names": names, "versions": _VERSIONS})
    done = host.run([sys.executable, str(_PROGRAM), str(libcuda)], timeout=SECONDS - 3, given=question)
    if done.returncode:
        return f"{_PROGRAM.name} ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
    return json.loads(done.stdout)


def symbol_rows(exports: Mapping[str, int], probed: Sequence[str]) -> Iterator[Row]:
    """What the library has of what is probed, and what it has that is newer."""
    from agent.probes.symbols import unknown_versions

    absent = [name for name in probed if name not in exports]
    yield _row(
        "probed symbols that libcuda exports",
        Verdict.MEASURED,
        len(probed) - len(absent),
        len(probed),
        f"not in this library: {_some(absent)}" if absent else "all of them",
    )
    newer = unknown_versions(list(exports))
    yield _row(
        "newer versions of probed calls that no probe knows",
        Verdict.DIFFERS if newer else Verdict.OK,
        len(newer),
        0,
        _some(newer),
    )


def linked_row(exports: Mapping[str, int], linked: Mapping[str, int | str]) -> Row:
    """What the dynamic linker gives for each name is where the file says that it is."""
    other = [name for name, place in linked.items() if place != exports[name]]
    return _row(
        "dlsym gives the exported functions",
        Verdict.DIFFERS if other else Verdict.OK,
        len(linked) - len(other),
        len(exports),
        f"elsewhere: {_some(other)}" if other else "",
    )


def pointer_rows(
    exports: Mapping[str, int], probed: Sequence[str], given: Sequence[ProcAddress], version: int
) -> Iterator[Row]:
    """One row that sums up, and one for each name whose address is no probe's place."""
    names: dict[int | str, list[str]] = {}
    for name, place in exports.items():
        names.setdefault(place, []).append(name)
    known = set(probed)
    inner = [one for one in given if one.place not in names]
    unprobed = [one for one in given if one.place in names and known.isdisjoint(names[one.place])]
    asked = f"{len({one.name for one in given})} names, versions to {version}"
    yield _sum("cuGetProcAddress gives exported functions", given, inner, asked)
    for name, found in _by_name(inner).items():
        yield _row(f"{name}: cuGetProcAddress gives no export", Verdict.DIFFERS, _at(found), note=_when(found))
    yield _sum("cuGetProcAddress gives functions that are probed", given, [*inner, *unprobed], asked)
    for name, found in _by_name(unprobed).items():
        gives = ", ".join(sorted({other for one in found for other in names[one.place]}))
        yield _row(f"{name}: cuGetProcAddress gives an unprobed export", Verdict.DIFFERS, gives, note=_when(found))
    yield _thread_row(exports, names, given)
    reached = {other for one in given for other in names.get(one.place, ())}
    never = [name for name in probed if name in exports and name not in reached]
    yield _row(
        "probed exports that cuGetProcAddress gives for no version", Verdict.MEASURED, len(never), note=_some(never)
    )


def _thread_row(exports: Mapping[str, int], names: Mapping[int | str, list[str]], given: Sequence[ProcAddress]) -> Row:
    """Of calls that have such a form, a program compiled for per-thread default streams gets that one."""
    forms = {_FORM.sub("", name) for name in exports if name.endswith(_OF_THREAD)}
    newest: dict[str, ProcAddress] = {}
    for one in given:
        if one.flag == "per-thread" and one.name in forms:
            newest[one.name] = one
    other = [n for n, one in newest.items() if not any(x.endswith(_OF_THREAD) for x in names.get(one.place, ()))]
    return _row(
        "per-thread default streams: cuGetProcAddress gives the functions with _ptsz or _ptds",
        Verdict.DIFFERS if other else Verdict.OK,
        len(newest) - len(other),
        len(newest),
        f"others: {_some(other)}" if other else "",
    )


def entry_rows(libcuda: Path, functions: Mapping[str, Extent]) -> Iterator[Row]:
    """What the kernel does with first instructions, and the first bytes of the calls that matter most."""
    from agent.node.instructions import LONGEST_BYTES, EntryInstruction, entry_here

    with libcuda.open("rb") as stream:
        begins = {name: os.pread(stream.fileno(), LONGEST_BYTES, at.offset) for name, at in functions.items()}
    found = {name: entry_here(code) for name, code in begins.items()}
    for kind in (*EntryInstruction, None):
        named = [name for name, entry in found.items() if entry is kind]
        common = Counter(begins[name][:4].hex(" ") for name in named).most_common(5)
        yield _row(
            f"first instruction: {kind or 'unknown'}",
            Verdict.MEASURED,
            len(named),
            len(found),
            "; ".join(f"{count} × {code}" for code, count in common),
        )
    for name, code in begins.items():
        if _SHOWN.fullmatch(name.removesuffix("_ptsz")):
            yield _row(f"{name}: first bytes", Verdict.MEASURED, code[:16].hex(" "), note=str(found[name] or "unknown"))


def place_rows(functions: Mapping[str, Extent], places: Mapping[int, ProbePlace]) -> Iterator[Row]:
    """Where the agent's probes stand, and whether they are cheap there."""
    from agent.node.instructions import EntryInstruction

    found = {name: places[extent.offset] for name, extent in functions.items()}
    expensive = [name for name, place in found.items() if place.instruction is not EntryInstruction.EMULATED]
    yield _row(
        "probes on an instruction that the kernel emulates",
        Verdict.DIFFERS if expensive else Verdict.OK,
        len(found) - len(expensive),
        len(found),
        f"others: {_some(expensive)}" if expensive else "",
    )
    distances = Counter(place.distance for place in found.values())
    shown = ", ".join(f"{count} × +{distance}" for distance, count in sorted(distances.items()))
    yield _row("bytes from a function's first to its probe", Verdict.MEASURED, shown)


def _sum(what: str, given: Sequence[ProcAddress], wrong: Sequence[ProcAddress], note: str) -> Row:
    if not given:
        return failed(ITEM, what, f"it gave nothing at all: {note}")
    return _row(what, Verdict.DIFFERS if wrong else Verdict.OK, len(given) - len(wrong), len(given), note)


def _by_name(given: Sequence[ProcAddress]) -> dict[str, list[ProcAddress]]:
    found: dict[str, list[ProcAddress]] = {}
    for one in given:
        found.setdefault(one.name, []).append(one)
    return found


def _at(given: Sequence[ProcAddress]) -> str:
    return ", ".join(sorted({f"{one.place:#x}" if isinstance(one.place, int) else one.place for one in given}))


def _when(given: Sequence[ProcAddress]) -> str:
    return "asked with " + ", ".join(sorted({f"{one.flag} {one.version}" for one in given}))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _row(what: str, verdict: Verdict, figure: int | str | None, baseline: int | None = None, note: str = "") -> Row:
    return Row(item=ITEM, what=what, verdict=verdict, figure=figure, baseline=baseline, note=note)
