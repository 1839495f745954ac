# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Licences of what may be shipped in one package with Apache-2.0 code.

The programs of a whole Debian system, as in the image, are not judged here: each is a work of its own, on the terms of
its own copyright file.
"""

from __future__ import annotations

from typing import Any, Final

from license_expression import ExpressionError, get_spdx_licensing

# Permissive ones, and MPL-2.0, whose files may be part of a larger work (its section 3.3).
ALLOWED: Final = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
        "Python-2.0",
        "Unicode-3.0",
        "Unicode-DFS-2016",
        "Unlicense",
        "Zlib",
    }
)
_SPDX: Final = get_spdx_licensing()


def is_allowed(expression: str) -> bool:
    """Whether one choice that the SPDX expression leaves has nothing but allowed licences. ValueError: it is none."""
    try:
        parsed = _SPDX.parse(expression, validate=True)
    except ExpressionError as error:
        raise ValueError(f"{expression!r} is no SPDX licence expression: {error}") from error
    if parsed is None:
        raise ValueError(f"{expression!r} is no SPDX licence expression: it is empty")
    return _holds(parsed)


def _holds(node: Any) -> bool:
    if isinstance(node, _SPDX.OR):
        return any(map(_holds, node.args))
    if isinstance(node, _SPDX.AND):
        return all(map(_holds, node.args))
    return node.render() in ALLOWED
