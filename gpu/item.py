# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m gpu.item NAME --run FOLDER --rows-to DESCRIPTOR`: one item, in the process that the driver gave it.

Its rows are lines of JSON, written as they come. SIGTERM makes it clean up and end; so does the driver's death.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from gpu import items
from gpu.here import Unavailable
from gpu.look import Look, look_from
from gpu.place import place
from gpu.row import Row, failed, skipped

LOOK: Final = "look.json"  # in the run's folder
WHOLE: Final = "the whole item"  # the `what` of a row that speaks of no part of it
_PR_SET_PDEATHSIG: Final = 1


def perform(name: str, look: Look, folder: Path, *, quick: bool, seconds: float) -> Iterator[Row]:
    """Rows of an item; what stops it is its last one."""
    try:
        with place(look, folder, quick=quick, seconds=seconds) as here:
            yield from items.item(name).rows(here)
    except Unavailable as why:
        yield skipped(name, WHOLE, str(why))
    except Exception as error:  # noqa: BLE001 - an item may break in any way, and the others go on
        traceback.print_exc()
        yield failed(name, WHOLE, blamed(error))


def blamed(error: Exception) -> str:
    """In one line what happened, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"


def main(argv: list[str] | None = None) -> int:
    """0 also where the item failed: its rows say so."""
    parser = argparse.ArgumentParser(prog="python -m gpu.item", description="One item; `python -m gpu` runs them all.")
    parser.add_argument("name", choices=items.ORDER, metavar="NAME")
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help=f"with {LOOK} in it")
    parser.add_argument("--rows-to", type=int, default=1, metavar="DESCRIPTOR", help="default: standard output")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that it has")
    given = parser.parse_args(argv)
    _end_with_the_driver()
    signal.signal(signal.SIGTERM, _leave)
    look = look_from((given.run / LOOK).read_text())
    write = _writer(given.rows_to)
    for row in perform(given.name, look, given.run / given.name, quick=given.quick, seconds=given.seconds):
        write(row)
    return 0


def _writer(descriptor: int) -> Callable[[Row], None]:
    os.set_inheritable(descriptor, False)

    def write(row: Row) -> None:
        try:
            line = row.as_json()
        except (TypeError, ValueError) as error:  # no number, or none that JSON has
            line = failed(row.item, row.what, f"{error}: {row.figure!r}, against {row.baseline!r}").as_json()
        os.write(descriptor, f"{line}\n".encode())

    return write


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end_with_the_driver() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
