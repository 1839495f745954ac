# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A pipeline as a YAML file, and its split as fragments for a policy or for pods.

```yaml
slo: {target: 200ms, quantile: 0.99, window: 10s}
stages:
  detect:
    match: {namespace: serving, pod: "detect-*"}   # left out: {pod: "detect-*"}
    levels: [{latency: 30ms, offline: 10%}, {latency: 60ms, offline: 45%}]
  track:
    after: [detect]
    slo: {signal: http, port: 8000}                # left out: gpu_wait
    levels: [{latency: 20ms, offline: 5%}, {latency: 90ms, offline: 60%}]
```

Only what the split needs is checked here; the rest of `slo` and `match` goes into the fragments as it is, and the node
agent's own `gpuwarden check` judges it. Durations are written as a policy has them: with a unit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import yaml

from fleet.model import FleetError
from fleet.pipeline.search import Level
from fleet.pipeline.split import Part, Pipeline, Split, Stage

_MOST_BYTES: Final = 1 << 18  # the most stages with the most levels take about 200 KiB
_DEEPEST: Final = 64
_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?(us|µs|ms|s|m|h)")
_PERCENT: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?%")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,63}")  # of a rule in a policy
_SLO: Final = {"signal": "gpu_wait", "quantile": 0.99, "window": "10s"}
_ANNOTATED: Final = ("signal", "port", "path", "status", "window", "min_samples")
_BY_PODS: Final = ("gpu_wait", "http")  # signals that a pod may declare


@dataclass(frozen=True, slots=True)
class Document:
    """A pipeline, and what its stages' rules hold beside the target."""

    pipeline: Pipeline
    slos: Mapping[str, Mapping[str, Any]]
    matches: Mapping[str, Mapping[str, Any]]


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_document(path: Path) -> Document:
    """FleetError: it cannot be read, or is no pipeline."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error}") from error
    if len(content) > _MOST_BYTES:
        raise FleetError(f"{path} is larger than 256 KiB, which no pipeline is")
    try:
        return parse(content.decode())
    except UnicodeDecodeError as error:
        raise FleetError(f"{path} is not UTF-8; save it as that") from error
    except FleetError as error:
        raise FleetError(f"{path}: {error}") from error


def parse(text: str) -> Document:
    """FleetError: it is no pipeline."""
    if _depth(text) > _DEEPEST:
        raise FleetError("it is not YAML of a pipeline: its brackets are nested too deeply; close them")
    try:
        whole = yaml.load(text, _Loader)  # a subclass of SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise FleetError(f"it is not YAML: {' '.join(str(error).split())[:300]}") from error
    top = _mapping(whole, "the file", ("slo", "stages"))
    slo = _mapping(top.get("slo"), "`slo`")
    stages = _mapping(top.get("stages"), "`stages`")
    found, slos, matches = [], {}, {}
    for name, entry in stages.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise FleetError(f"{name!r} is no name of a stage: 1 to 63 letters, digits, dots, dashes, underscores")
        stage = _mapping(entry, f"stage {name!r}", ("after", "levels", "match", "slo"))
        found.append(Stage(name, _levels(name, stage.get("levels")), _after(name, stage.get("after", []))))
        own = _mapping(stage.get("slo", {}), f"`slo` of stage {name!r}")
        if "target" in own:
            raise FleetError(f"stage {name!r} has a `target` of its own; remove it, as the split is to find it")
        slos[name] = {**_SLO, **{key: value for key, value in slo.items() if key != "target"}, **own}
        matches[name] = _mapping(stage.get("match", {"pod": f"{name}-*"}), f"`match` of stage {name!r}")
    return Document(Pipeline(_duration_s(slo.get("target"), "`target` of `slo`"), tuple(found)), slos, matches)


def _depth(text: str) -> int:
    """Of brackets, at most; PyYAML's time grows with its square."""
    return max(accumulate((character in "[{") - (character in "]}") for character in text), default=0)


def _mapping(value: object, what: str, keys: tuple[str, ...] = ()) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FleetError(f"{what} is missing, or is no mapping; write KEY: VALUE lines below it")
    if keys and (unknown := [key for key in value if key not in keys]):
        raise FleetError(f"{what} has the unknown key {unknown[0]!r}; there are: {', '.join(keys)}")
    return value


def _levels(name: str, value: object) -> tuple[Level, ...]:
    if not isinstance(value, list):
        raise FleetError(f"stage {name!r} has no list of `levels`; write {{latency: 30ms, offline: 10%}} for each")
    levels = []
    for entry in value:
        level = _mapping(entry, f"a level of stage {name!r}", ("latency", "offline"))
        latency_s = _duration_s(level.get("latency"), f"`latency` of a level of stage {name!r}")
        levels.append(Level(latency_s, _ratio(level.get("offline"), f"`offline` of a level of stage {name!r}")))
    return tuple(levels)


def _after(name: str, value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(other, str) for other in names):
        raise FleetError(f"`after` of stage {name!r} is neither a stage's name nor a list of them")
    return tuple(names)


def _duration_s(value: object, what: str) -> float:
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise FleetError(f"{what} is no duration; write a number and one of us, ms, s, m, h, such as 50ms")
    return float(found[1]) * _UNITS_S[found[2].replace("µ", "u")]


def _ratio(value: object, what: str) -> float:
    if isinstance(value, str) and (found := _PERCENT.fullmatch(value)):
        return float(found[1]) / 100
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FleetError(f"{what} is no share; write a percentage such as 45% or a number from 0 to 1")
    return float(value)


def duration(seconds: float) -> str:
    """In whole microseconds, rounded down so that the parts still add up. FleetError: under one."""
    microseconds = int(seconds * 1e6 + 1e-3)  # 0.03 × 1e6 is 29999.999…
    if microseconds < 1:
        raise FleetError(
            "a stage would get less than 1us, which no policy can say; give its levels realistic latencies"
        )
    return f"{microseconds}us" if microseconds % 1000 else f"{microseconds // 1000}ms"


def policy_fragment(document: Document, found: Split) -> str:
    """Rules for the `online` list of a policy, as YAML."""
    return _dumped({"online": [_rule(document, part) for part in found.parts]})


def _rule(document: Document, part: Part) -> dict[str, Any]:
    slo = dict(document.slos[part.name])
    ordered = {"signal": slo.pop("signal"), "quantile": slo.pop("quantile"), "target": duration(part.slo_s), **slo}
    return {"name": part.name, "match": document.matches[part.name], "slo": ordered}


def declared(document: Document, part: Part) -> dict[str, str]:
    """For the pods of a stage. FleetError: its signal or quantile cannot be declared by a pod."""
    slo = document.slos[part.name]
    if slo["signal"] not in _BY_PODS:
        raise FleetError(f"the signal of stage {part.name!r} cannot be declared by a pod; use `--as policy`")
    quantile = _ratio(slo["quantile"], f"`quantile` of stage {part.name!r}")
    found = {"class": "online", f"slo-p{quantile * 100:.10g}": duration(part.slo_s)}
    found |= {key.replace("_", "-"): str(slo[key]) for key in _ANNOTATED if key in slo}
    return {f"gpuwarden.io/{key}": value for key, value in found.items()}


def annotation_fragments(document: Document, found: Split) -> str:
    """One YAML document for each stage's pods."""
    return "---\n".join(
        f"# {part.name}\n" + _dumped({"metadata": {"annotations": declared(document, part)}}) for part in found.parts
    )


def _dumped(value: object) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
