# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Boots kernels as distributions ship them, with each layout of cgroups, and runs the agent and its tests in there.

Debian's kernels, under qemu without acceleration, in a small Debian of their own: nothing of this machine's kernel is
used. Prints what works where, and which tests failed. The kernels are those that the archive has now.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from agent.core.errors import SetupError
from bench.kernels import root
from bench.kernels.features import FEATURES, OF_CGROUPS, cell, row
from tools.harness import stock_kernels

_FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "kernels"
_MEMORY_MIB: Final = 4096
_CPUS: Final = 2
_TABLE_COLUMNS: Final = 190
_LONGEST_SECONDS: Final = 1800.0
_OLD: Final = ("debian-security bullseye-security",)
_USUAL: Final = ("debian-security bookworm-security", "debian trixie-backports")
_NEW: Final = ("debian sid", "debian experimental")


@dataclass(frozen=True, slots=True)
class Machine:
    """A kernel and how cgroups are mounted there. `before`: the first version that it is not.

    `features`: what is tried; on the second and third layout of a kernel what may depend on the layout.
    """

    name: str
    cgroups: str
    oldest: tuple[int, int]
    before: tuple[int, int]
    sources: Sequence[str] = _USUAL
    newest: bool = False
    features: Collection[str] = tuple(FEATURES)
    architecture: str = "amd64"


MACHINES: Final = (
    Machine("5.10", "hybrid", (5, 10), (5, 11), _OLD),
    Machine("6.1", "v1", (6, 1), (6, 2), features=OF_CGROUPS),
    Machine("6.1", "hybrid", (6, 1), (6, 2), features=OF_CGROUPS),
    Machine("6.1", "v2", (6, 1), (6, 2)),
    Machine("6.12", "hybrid", (6, 12), (6, 13), features=OF_CGROUPS),
    Machine("6.12", "v2", (6, 12), (6, 13)),
    Machine("6.18", "hybrid", (6, 18), (6, 19), features=OF_CGROUPS),
    Machine("6.18", "v2", (6, 18), (6, 19)),
    Machine("newest", "v2", (7, 0), (99, 0), _NEW, newest=True),
    Machine("6.12", "v2", (6, 12), (6, 13), architecture="arm64"),
)


@cache
def image(
    sources: Sequence[str], oldest: tuple[int, int], before: tuple[int, int], newest: bool, architecture: str
) -> Path:
    """A kernel, which several machines may have. SetupError."""
    folder = _FOLDER / architecture / f"kernel-{oldest[0]}.{oldest[1]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return stock_kernels.Archive(folder, sources, architecture).kernel(oldest, before, newest=newest)


_QEMU: Final[Mapping[str, tuple[Sequence[str], str]]] = {  # by architecture: the machine, and its console
    "amd64": (("qemu-system-x86_64", "-cpu", "max"), "ttyS0"),
    "arm64": (("qemu-system-aarch64", "-machine", "virt", "-cpu", "max,pauth-impdef=on"), "ttyAMA0"),
}


def boot(architecture: str, kernel: Path, system: Path, words: str, console: Path) -> str:
    """What one has written to its console, at its end or when it has had its time; `console` has it meanwhile."""
    machine, terminal = _QEMU[architecture]
    options = ["-accel", "tcg,thread=multi", "-smp", str(_CPUS), "-m", str(_MEMORY_MIB)]
    line = f"console={terminal} quiet panic=-1 mitigations=off {words}"
    command = [*machine, *options, "-nographic", "-no-reboot", "-net", "none"]
    command += ["-initrd", str(system), "-kernel", str(kernel), "-append", line]
    with console.open("wb") as out, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=_LONGEST_SECONDS, check=False)
    return console.read_text(errors="replace").replace("\r", "")


def table(rows: Iterable[Mapping[str, Any]], only: Sequence[str]) -> Table:
    """A line for each machine."""
    shown = [name for name in FEATURES if not only or name in only]
    made = Table("kernel", "architecture", "cgroups", *shown, "minutes", title="what works where (² at the second try)")
    for one in rows:
        cells = [cell(one, feature) for feature in shown]
        if "refusal" in one["properties"]:
            cells = [("refused" if one["ok"] else "NO"), *["–"] * (len(shown) - 1)]
        made.add_row(
            one["kernel"] or one["wanted"], one["architecture"], one["cgroups"], *cells, f"{one['seconds'] / 60:.1f}"
        )
    return made


def _print_details(one: Mapping[str, Any]) -> None:
    if refusal := one["properties"].get("refusal"):
        print(f"   refused: {refusal}")
    for feature, result in one["features"].items():
        for number, (test, why) in enumerate(result["failed"].items()):
            print(f"   {feature}: {test}" + ("" if number else "\n      " + why.replace("\n", "\n      ")))
        for test, why in result["skipped"].items() if not result["ok"] else ():
            print(f"   {feature}: {test}: skipped: {why}")
    for complaint in one["complaints"]:
        print(f"   the kernel: {complaint}")
    if not one["ended"]:
        print("   it did not run to its end")


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    names = sorted({machine.name for machine in MACHINES})
    parser.add_argument("--kernels", default="", metavar="A,B", help=f"these alone, of {', '.join(names)}")
    parser.add_argument("--cgroups", default="", metavar="A,B", help="these layouts alone, of v1, hybrid, v2")
    parser.add_argument("--architectures", default="", metavar="A,B", help="these alone, of amd64, arm64")
    parser.add_argument("--features", default="", metavar="A,B", help=f"these alone, of {', '.join(FEATURES)}")
    parser.add_argument(
        "--consoles", type=Path, metavar="DIR", help="for what each machine writes (default: build/kernels/consoles)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    options = parser.parse_args(given)
    choices = {"kernels": names, "cgroups": ["v1", "hybrid", "v2"], "architectures": list(_QEMU), "features": FEATURES}
    for name, known in choices.items():
        wanted = [word for word in getattr(options, name).split(",") if word]
        if unknown := set(wanted) - set(known):
            parser.error(f"--{name} {unknown.pop()}: it is none of {', '.join(known)}")
        setattr(options, name, wanted)
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all that was tried works; 3 when nothing can be booted here."""
    options = _arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the machine that runs is ended
    rows = []
    try:
        stock_kernels.require()
        systems: dict[str, Path] = {}
        for machine in MACHINES:
            if not _is_wanted(machine, options):
                continue
            if (architecture := machine.architecture) not in systems:
                print(f"kernels: making the machines' file system, {architecture}", flush=True)
                systems[architecture] = root.make(_FOLDER / architecture, architecture)
            features = [name for name in options.features or FEATURES if name in machine.features]
            if features:
                rows.append(_tried(machine, features, systems[architecture], options.consoles))
    except SetupError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 3
    Console(width=max(_TABLE_COLUMNS, shutil.get_terminal_size().columns)).print(table(rows, options.features))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1, ensure_ascii=False) + "\n")
    failed = [one for one in rows if not one["ok"]]
    print(f"kernels: {len(rows) - len(failed)} of {len(rows)} machines passed")
    return 1 if failed else 0


def _is_wanted(machine: Machine, options: argparse.Namespace) -> bool:
    chosen = (
        (options.kernels, machine.name),
        (options.cgroups, machine.cgroups),
        (options.architectures, machine.architecture),
    )
    return all(not wanted or name in wanted for wanted, name in chosen)


def _tried(machine: Machine, features: Collection[str], system: Path, consoles: Path | None) -> dict[str, Any]:
    """One machine, from its boot to its end."""
    kernel = image(machine.sources, machine.oldest, machine.before, machine.newest, machine.architecture)
    print(f"kernels: {kernel.name} with cgroups {machine.cgroups}", flush=True)
    began = time.monotonic()
    folder = consoles or _FOLDER / "consoles"
    folder.mkdir(parents=True, exist_ok=True)
    words = f"cgroups={machine.cgroups} features={','.join(features)}"
    name = f"{machine.name}-{machine.cgroups}-{machine.architecture}.txt"
    console = boot(machine.architecture, kernel, system, words, folder / name)
    known = {"wanted": machine.name, "cgroups": machine.cgroups, "architecture": machine.architecture}
    found = {**row(known, console), "seconds": round(time.monotonic() - began)}
    print(f"   {'passed' if found['ok'] else 'FAILED'} after {found['seconds'] / 60:.1f} minutes", flush=True)
    _print_details(found)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
