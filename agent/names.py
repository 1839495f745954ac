# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names from outside (containers, commands, users), made fit to be shown.

Invariant: what comes out moves no cursor, hides or reorders no text and can be encoded, whatever a container is called.
"""


def printable(name: str) -> str:
    """The name with controls, line breaks, invisible and bidirectional marks and broken bytes written as escapes."""
    return name if name.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in name)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()
