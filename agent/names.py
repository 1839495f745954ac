# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names from outside (containers, commands, users), made fit to be shown.

Invariant: what comes out moves no cursor, hides or reorders no text and can be encoded, whatever a container is called.
"""


def printable(text: str, longest: int | None = None) -> str:
    """The text with controls, line breaks, invisible and bidirectional marks and broken bytes written as escapes.

    With `longest`, cut to so many characters, an ellipsis being the last.
    """
    if longest is not None:
        text = text[: longest + 1]
    safe = text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)
    return safe if longest is None or len(safe) <= longest else safe[: longest - 1] + "…"


def joined(*parts: str | None) -> str:
    """Those that there are, as in namespace/pod/container."""
    return "/".join(part for part in parts if part)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, as surrogateescape keeps it
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
