# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a pair is worth: predictors by name, each made from the table of measured pairs, and penalties for bad ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from fleet.model import Predictor
from fleet.weights.physical import Physical
from fleet.weights.table import Table


def _physical(table: Table) -> Physical:
    """Ignores what was measured."""
    return table.prior


def _table(table: Table) -> Table:
    return table


def _learned(table: Table) -> Table:
    from fleet.weights.learned import learn  # it needs numpy, which the others do without

    return learn(table)


BUILTIN: Final[Mapping[str, Callable[[Table], Predictor]]] = MappingProxyType(
    {"physical": _physical, "table": _table, "learned": _learned}
)
"""Name → what makes the predictor"""
