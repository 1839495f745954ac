# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m tests.fuzz.worker TARGET LIBFUZZER-ARGUMENTS…`: one target under libFuzzer, in bounded memory.

atheris feeds the branches that the product's Python takes, and those of the parsers in Python below it, to libFuzzer.
"""

from __future__ import annotations

import logging
import resource
import sys
from functools import partial
from typing import Final

import atheris

from tests.fuzz.target import judge

_MOST_BYTES: Final = 2 << 30
"""Of address space: an input that makes the product take more is a MemoryError, and so a fault"""
_INSTRUMENTED: Final = ["agent", "enforce", "fleet", "gpuwarden", "yaml", "elftools", "prometheus_client", "http"]


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    with atheris.instrument_imports(include=_INSTRUMENTED):
        from tests.fuzz.targets import TARGETS
    name, *arguments = sys.argv[1:]
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    atheris.Setup([sys.argv[0], *arguments], partial(judge, TARGETS[name]))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
