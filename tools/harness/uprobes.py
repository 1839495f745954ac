# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs that only measure (`make bpf` puts them in build/bpf), attached as the agent attaches its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.node.elf import exported_extents
from agent.node.instructions import AT_ENTRY, places
from agent.probes.attachment import Attachment, Attachments, ProbedFunction
from agent.probes.libbpf import BpfObject
from agent.probes.libraries import OpenFile
from agent.probes.symbols import PROGRAMS, SYMBOLS, by_offset

MEASURING: Final = Path(__file__).resolve().parents[2] / "build" / "bpf"


@contextmanager
def attached(bpf: BpfObject, file: Path, functions: Callable[[int], Sequence[ProbedFunction]]) -> Iterator[Attachment]:
    """Probes on the functions that `functions` finds in the open file, until the end of the block. ProbeError, OSError.

    What the kernel refuses is in the attachment's `failed`.
    """
    attachments = Attachments(bpf, lambda _: None)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        attachment = attachments.attach(OpenFile.of(descriptor, str(file)), functions)
        yield attachment
        attachments.drop(attachment)
    finally:
        attachments.close()
        os.close(descriptor)


def agents_functions(descriptor: int, program: str, *, at_entry: bool = False) -> list[ProbedFunction]:
    """One program wherever the agent has one, at entries and at returns. ProbeError.

    `at_entry`: on the first instruction, whatever a probe costs there.
    """
    extents = exported_extents(descriptor, "cu")
    found = places(descriptor, extents.values())
    return [
        ProbedFunction(
            symbol.name,
            offset,
            number,
            program,
            program if PROGRAMS[symbol.role][1] else None,
            AT_ENTRY if at_entry else found[offset],
        )
        for number, (offset, symbol) in enumerate(by_offset(SYMBOLS, extents).items())
    ]
