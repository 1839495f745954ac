# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kinds of values that are numbers: durations, sizes, ratios, counts."""

from __future__ import annotations

from dataclasses import dataclass

from enforce.policy import units
from enforce.policy.kind import JsonSchema, Kind, mistake, quote


@dataclass(frozen=True)
class Duration(Kind):
    """ns, from `least` to `most` (both as people write them)."""

    example: str = "10s"
    least: str = "1us"
    most: str = "1h"

    @property
    def says(self) -> str:
        return f"duration, {self.least} to {self.most}"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": units.pattern(units.DURATION_NS)}

    def read(self, value: object) -> int:
        try:
            duration_ns = units.parse_duration_ns(value)
        except units.UnitError as error:
            raise mistake(f"{quote(value)} {error.what}", error.instead) from None
        if not units.parse_duration_ns(self.least) <= duration_ns <= units.parse_duration_ns(self.most):
            instead = f"write {self.least} to {self.most}, such as {self.example}"
            raise mistake(f"{quote(value)} is out of range", instead)
        return duration_ns

    def show(self, value: int) -> str:
        return units.format_duration(value)


@dataclass(frozen=True)
class Size(Kind):
    """Bytes, at least 1 MiB: less is a slip of the unit."""

    example: str = "40GiB"

    @property
    def says(self) -> str:
        return "size, 1MiB or more"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": units.pattern(units.SIZE_BYTES)}

    def read(self, value: object) -> int:
        try:
            size_bytes = units.parse_size_bytes(value)
        except units.UnitError as error:
            raise mistake(f"{quote(value)} {error.what}", error.instead) from None
        if not 2**20 <= size_bytes < 2**50:
            raise mistake(f"{quote(value)} is out of range", f"write 1MiB to 1023TiB, such as {self.example}")
        return size_bytes

    def show(self, value: int) -> str:
        return units.format_size(value)


@dataclass(frozen=True)
class Ratio(Kind):
    """0–1. `inside`: neither 0 nor 1 themselves. `above_zero`: not 0."""

    example: str = "5%"
    inside: bool = False
    above_zero: bool = False

    @property
    def says(self) -> str:
        if self.inside:
            return "percentage or number, between 0 and 1, both excluded"
        return f"percentage or number, {'above 0, up to 1' if self.above_zero else '0 to 1'}"

    def json_schema(self) -> JsonSchema:
        least = {"exclusiveMinimum" if self.inside or self.above_zero else "minimum": 0}
        most = {"exclusiveMaximum" if self.inside else "maximum": 1}
        return {"anyOf": [{"type": "number", **least, **most}, {"type": "string", "pattern": units.pattern(["%"])}]}

    def read(self, value: object) -> float:
        instead = f"write a number {self.says.split(', ', 1)[1]}, such as {self.example}"
        try:
            ratio = units.parse_ratio(value)
        except units.UnitError as error:
            raise mistake(f"{quote(value)} {error.what}", instead) from None
        if (ratio == 0 and (self.inside or self.above_zero)) or (ratio == 1 and self.inside):
            raise mistake(f"{quote(value)} is out of range", instead)
        return ratio

    def show(self, value: float) -> str:
        return units.format_ratio(value)


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `least` to `most`."""

    least: int = 1
    most: int = 1_000_000
    example: str = "20"

    @property
    def says(self) -> str:
        return f"whole number, {self.least} to {self.most}"

    def json_schema(self) -> JsonSchema:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise mistake(f"{quote(value)} is not a whole number", f"write one such as {self.example}")
        if not self.least <= value <= self.most:
            raise mistake(f"{value} is out of range", f"write {self.least} to {self.most}")
        return value


@dataclass(frozen=True)
class Version(Kind):
    """The format's version: exactly the one that this program reads."""

    number: int

    @property
    def says(self) -> str:
        return f"the number {self.number}"

    @property
    def example(self) -> str:
        return str(self.number)

    def json_schema(self) -> JsonSchema:
        return {"const": self.number}

    def read(self, value: object) -> int:
        if isinstance(value, bool) or value != self.number or not isinstance(value, int):
            raise mistake(f"{quote(value)} is not a version that this program reads", f"write version: {self.number}")
        return value


@dataclass(frozen=True)
class Weight(Kind):
    """A number; only the proportions count."""

    least: float = 0.001
    most: float = 1000
    example: str = "2"

    @property
    def says(self) -> str:
        return f"number, {self.least:g} to {self.most:g}"

    def json_schema(self) -> JsonSchema:
        return {"type": "number", "minimum": self.least, "maximum": self.most}

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise mistake(f"{quote(value)} is not a number", "write one such as 1 or 2.5")
        if not self.least <= value <= self.most:  # also false for nan
            instead = f"write a number from {self.least:g} to {self.most:g}"
            raise mistake(f"{quote(value)} is out of range", instead)
        return float(value)

    def show(self, value: float) -> str:
        return f"{value:g}"
