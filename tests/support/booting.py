# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""For tests that boot kernels (tools/harness/stock_kernels.py), or need what Debian's archive has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.errors import SetupError
from tools.harness import stock_kernels

FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{Path(__file__).parents[2] / 'bpf'}")
"""Of gcc, for what runs in a guest"""


@contextmanager
def or_skip() -> Iterator[None]:
    """What a machine or Debian's archive lacks is a reason to skip."""
    try:
        yield
    except SetupError as error:
        pytest.skip(str(error))


def stock_images(folder: Path, ranges: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> list[Path]:
    """Debian's oldest kernel in each range of versions. SetupError where there is none, or nothing can be booted."""
    stock_kernels.require()
    archive = stock_kernels.Archive(folder)
    return [archive.kernel(*versions) for versions in ranges]
