# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Small functions in machine code, in a file that programs can map: places for probes whose cost is to be known.

A uprobe wants a place in a file and no more: no library, so no compiler. x86-64 only; conformance/programs/calling.py
calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

_ROOM_BYTES: Final = 64  # for each: no two share a line of the cache
_FILE_BYTES: Final = 4096

# Calls its second argument so often as its first says, and keeps to what a called function may change.
LOOP: Final = bytes.fromhex(
    "53"  # push %rbx
    "55"  # push %rbp
    "4883ec08"  # sub $8,%rsp: calls want the stack aligned
    "4889fb"  # mov %rdi,%rbx
    "4889f5"  # mov %rsi,%rbp
    "ffd5"  # again: call *%rbp
    "48ffcb"  # dec %rbx
    "75f9"  # jne again
    "4883c408"  # add $8,%rsp
    "5d"  # pop %rbp
    "5b"  # pop %rbx
    "c3"  # ret
)

FUNCTIONS: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        "push": bytes.fromhex("555dc3"),
        "nop": bytes.fromhex("90c3"),
        "long nop": bytes.fromhex("0f1f440000c3"),
        "jump": bytes.fromhex("eb00c3"),
        "endbr64": bytes.fromhex("f30f1efac3"),
        "move": bytes.fromhex("4889f8c3"),
        "sub": bytes.fromhex("4883ec084883c408c3"),
    }
)


def write(path: Path, functions: Mapping[str, bytes] = FUNCTIONS) -> dict[str, int]:
    """The loop and the functions into a file; the offset of each, the loop's as "loop"."""
    text, places = bytearray(), {}
    for name, code in {"loop": LOOP, **functions}.items():
        places[name] = len(text)
        text += code.ljust(_ROOM_BYTES, b"\xcc")
    path.write_bytes(bytes(text).ljust(_FILE_BYTES, b"\xcc"))
    return places
