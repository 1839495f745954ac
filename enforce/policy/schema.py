# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The keys of a policy file: kind, default and meaning of each. docs/policy.md is generated from this file.

pydantic only validates and converts to base units here; the product works with `enforce.policy.model`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from enforce.policy import vocabulary
from enforce.policy.kind import mistake, quote
from enforce.policy.places import FilePath, MetricName, Offset, SymbolName, Url, UrlPath
from enforce.policy.quantities import Duration, Ratio, Size, Version, Weight, Whole
from enforce.policy.words import Flag, Glob, Name, Word

MS = 1_000_000
VERSION = 1


def _patterns(value: Any) -> Any:
    """One pattern or several: a single one is a list of one. A list that is empty would match nothing."""
    if isinstance(value, list):
        if not value:
            raise mistake("an empty list matches nothing", "write a pattern or leave the key out")
        return value
    return [value]


def _not_empty(value: Any) -> Any:
    if isinstance(value, (dict, list)) and not value:
        raise mistake("is empty", "write at least one entry or leave the key out")
    return value


def _labels(value: Any) -> Any:
    if not isinstance(value, dict):
        raise mistake(f"{quote(value)} is not a mapping", "write label names and patterns, such as {app: chat}")
    return _not_empty(value)


_GLOB = Glob().json_schema()
_PATTERNS = {"anyOf": [_GLOB, {"type": "array", "items": _GLOB, "minItems": 1}]}
_LABELS = {"type": "object", "additionalProperties": _PATTERNS, "minProperties": 1}
Patterns = Annotated[list[Annotated[str, Glob()]], BeforeValidator(_patterns), WithJsonSchema(_PATTERNS)]
Labels = Annotated[dict[str, Patterns], BeforeValidator(_labels), WithJsonSchema(_LABELS)]


class Section(BaseModel):
    """Unknown keys are refused, and so are keys without a value: `memory:` is a slip, not "no limit"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_value(cls, value: Any) -> Any:
        if value is None:
            raise mistake("the key has no value", "write one or leave the key out")
        return value


class MatchSection(Section):
    """Which containers a rule is about. All keys that are given must match; at least one must be given."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    namespace: Patterns | None = Field(None, description="Kubernetes namespace of the pod.")
    pod: Patterns | None = Field(None, description="Name of the pod.")
    container: Patterns | None = Field(
        None, description="Name of the container, as `gputop` shows it; a short id is none."
    )
    image: Patterns | None = Field(None, description="Image reference, as the runtime writes it.")
    labels: Labels | None = Field(None, description="Label name → pattern. Every label named must be there and match.")
    unit: Patterns | None = Field(
        None,
        description="systemd unit that the processes run in (service or scope), or a slice around it. Below "
        "`user@UID.service` names are the user's choice and do not count: write `cgroup` there.",
    )
    cgroup: Patterns | None = Field(
        None, description="Path of the cgroup below the hierarchy's root; `*` also matches `/`."
    )
    user: Patterns | None = Field(
        None, description="User name. An offline rule wants all of the container's processes to match, others any one."
    )
    command: Patterns | None = Field(
        None, description="Command of a process, as `gputop` shows it; all processes or any one, as for `user`."
    )


def _by_signal() -> list[Any]:
    """As JSON Schema: which keys each signal needs, and that it has no other's."""
    conditions = []
    for signal, needed in vocabulary.NEEDED_KEYS.items():
        foreign = [key for other, keys in vocabulary.SIGNAL_KEYS.items() if other != signal for key in keys]
        then: dict[str, Any] = {"required": [*needed], "not": {"anyOf": [{"required": [key]} for key in foreign]}}
        if signal == "uprobe":
            then["oneOf"] = [{"required": ["symbol"]}, {"required": ["offset"]}]
        named = {"properties": {"signal": {"const": signal}}, "required": ["signal"]}
        conditions.append({"if": named, "then": then})
    return conditions


_BY_LAW: dict[str, Any] = {
    "if": {"properties": {"law": {"const": "fixed"}}, "required": ["law"]},
    "then": {"required": ["share"]},
    "else": {"not": {"required": ["share"]}},
}


class SloSection(Section):
    """The promise to an online container. The keys from `port` on belong to one signal each; others refuse them."""

    model_config = ConfigDict(json_schema_extra={"allOf": _by_signal()})

    signal: Annotated[str, Word(vocabulary.SIGNALS)] = Field(description="Where the latency comes from; see below.")
    quantile: Annotated[float, Ratio("0.99", inside=True)] = Field(
        description="Which quantile of the latency is promised."
    )
    target: Annotated[int, Duration("50ms", "1us", "10m")] = Field(description="What that quantile must stay under.")
    window: Annotated[int, Duration("10s", "100ms", "1h")] = Field(
        description="The span of time that the quantile is taken over."
    )
    min_samples: Annotated[int, Whole()] = Field(
        20, description="With fewer requests in the window the latency counts as unknown."
    )
    port: Annotated[int, Whole(1, 65535, "8000")] | None = Field(
        None, description="`http` (required): the port that the container listens on, as seen inside it."
    )
    path: Annotated[str, UrlPath()] | None = Field(
        None, description="`http`: only requests whose path begins so. Left out: all requests."
    )
    url: Annotated[str, Url()] | None = Field(
        None, description="`prometheus` (required): where the service shows its metrics."
    )
    metric: Annotated[str, MetricName()] | None = Field(
        None, description="`prometheus` (required): the histogram's name, without `_bucket`."
    )
    labels: Labels | None = Field(
        None, description="`prometheus`: only series with such labels; all that match are added up."
    )
    unit: Annotated[str, Word(tuple(vocabulary.UNITS_NS))] = Field(
        "s", description="`prometheus`: the unit of the histogram's `le`."
    )
    binary: Annotated[str, FilePath()] | None = Field(
        None, description="`uprobe` (required): the program or library, by its path inside the container."
    )
    symbol: Annotated[str, SymbolName()] | None = Field(
        None, description="`uprobe`: the function's name as in the file's symbols, mangled if it is. This or `offset`."
    )
    offset: Annotated[int, Offset()] | None = Field(
        None, description="`uprobe`: where the function begins in the file, in bytes. This or `symbol`."
    )
    nothrow: Annotated[bool, Flag()] = Field(
        False, description="`uprobe`: true says that no exception or panic ever leaves the function."
    )


class OnlineSection(Section):
    """Containers with a latency promise. They are never slowed."""

    name: Annotated[str, Name("chat")] = Field(description="The rule's name, unique in the file.")
    match: MatchSection = Field(description="Which containers.")
    slo: SloSection = Field(description="What they are promised.")
    reserve: Annotated[int, Size("20GiB")] | None = Field(
        None,
        description="Device memory that stays available to each of them, on the devices that it is on: offline work "
        "may take what is free beyond that. While none of them runs it is kept free on every device.",
    )


class LimitsSection(Section):
    """How far an offline container may be slowed, and what it may take."""

    memory: Annotated[int, Size()] | None = Field(
        None,
        description="Device memory that one container may hold on a device, contexts and managed memory included. "
        "Left out: no limit.",
    )
    floor: Annotated[float, Ratio("5%")] = Field(
        0.05,
        description="Share of the device that is left to it whatever the latency does, as a mean over two seconds: "
        "who had more before gets about half a millisecond per `max_pause` until that is used up.",
    )
    max_pause: Annotated[int, Duration("200ms", "1ms", "10s")] = Field(200 * MS, description="Longest single pause.")
    max_queued: Annotated[int, Duration("2ms", "10us", "10s")] | None = Field(
        None,
        description="Upper bound on the GPU work it may have queued. Left out: the law decides, from the SLO's slack.",
    )
    max_hold: Annotated[int, Duration("30s", "100ms", "1h")] = Field(
        30_000 * MS, description="Longest time that an allocation is held for want of memory."
    )
    evict_grace: Annotated[int, Duration("30s", "1s", "1h")] = Field(
        30_000 * MS, description="Evicted, its processes get SIGTERM, and so long after it SIGKILL."
    )


class OfflineSection(Section):
    """Best-effort containers. They may be slowed to keep the online containers' promises."""

    model_config = ConfigDict(json_schema_extra=_BY_LAW)

    name: Annotated[str, Name("training")] = Field(description="The rule's name, unique in the file.")
    match: MatchSection = Field(description="Which containers.")
    law: Annotated[str, Word(vocabulary.LAWS)] = Field("headroom", description="How the share is decided.")
    share: Annotated[float, Ratio("30%", above_zero=True)] | None = Field(
        None, description="The share of the device, with `law: fixed` and only there."
    )
    weight: Annotated[float, Weight()] = Field(
        1.0,
        description="How the offline share of a device is split between the containers that want it: by proportion.",
    )
    limits: LimitsSection = Field(
        default_factory=lambda: LimitsSection.model_validate({}), description="Bounds on what is done to it."
    )
    ladder: Annotated[list[Annotated[str, Word(vocabulary.RUNGS)]], BeforeValidator(_not_empty)] = Field(
        default=["gate", "pace", "deny", "hold"],
        json_schema_extra={"minItems": 1},
        description="What may be done to it; see below. In which order the list names them does not matter.",
    )


class AnnotationsSection(Section):
    """Whose pods may say by their annotations what they are, where no rule of the file names them; see below."""

    offline: Patterns | None = Field(None, description="Namespaces whose pods may say that they are offline.")
    online: Patterns | None = Field(
        None,
        description="Namespaces whose pods may say that they are online, and what they are promised: others are slowed "
        "for it.",
    )


class TuningSection(Section):
    """The control loop's own times. The defaults are right unless a measurement says otherwise."""

    decide_interval: Annotated[int, Duration("100ms", "10ms", "10s")] = Field(
        100 * MS, description="Time between two decisions."
    )
    gate_hold: Annotated[int, Duration("20ms", "100us", "1s")] = Field(
        20 * MS, description="An online request that launches nothing for so long counts as over, and the gate opens."
    )
    gate_open_delay: Annotated[int, Duration("100us", "0ms", "100ms")] = Field(
        MS // 5,
        description="How long the gate stays shut after the last online request, in case another follows at once.",
    )
    no_data_hold: Annotated[int, Duration("2s", "100ms", "10m")] = Field(
        2_000 * MS,
        description="Without a latency reading the share is held for so long; then offline work is released.",
    )
    tgs_sample: Annotated[int, Duration("5s", "100ms", "1m")] = Field(
        5_000 * MS, description="How long `law: tgs` counts the online side's blocks before each step."
    )


class BoundsSection(Section):
    """Bounds on what a device shows. A figure that is not known is beyond none; a key that is left out is no bound."""

    sm_activity: Annotated[float, Ratio("95%", above_zero=True)] | None = Field(
        None, description="Most SM activity, on GPUs that tell it (Hopper and later)."
    )
    utilization: Annotated[float, Ratio("99%", above_zero=True)] | None = Field(
        None, description="Most utilisation (share of time with a kernel running), on GPUs that tell only that."
    )
    memory: Annotated[float, Ratio("95%", above_zero=True)] | None = Field(
        None, description="Most device memory in use, as a share of all."
    )
    sm_clock: Annotated[int, Whole(1, 10_000, "1200")] | None = Field(
        None, description="Least SM clock in MHz while the device is at work (over 20 %)."
    )


class HealthSection(Section):
    """How the health of devices is judged. A GPU that is lost or broken (fatal XID) gets no offline work anyway."""

    devices: Patterns | None = Field(None, description="Names or UUIDs of the devices. Left out: all.")
    unhealthy: BoundsSection = Field(
        default_factory=lambda: BoundsSection.model_validate({}),
        description="Beyond these, offline work does not grow, and what is new gets its floor.",
    )
    overlimit: BoundsSection = Field(
        default_factory=lambda: BoundsSection.model_validate({}),
        description="Beyond these for longer than `patience`, offline work is brought to its floor and up its ladder.",
    )
    patience: Annotated[int, Duration("5s", "0ms", "10m")] = Field(
        5_000 * MS, description="How long the bounds of `overlimit` may be exceeded, or the GPU not answer."
    )
    init: Annotated[int, Duration("10s", "0ms", "10m")] = Field(
        0, description="How long a device is watched before it counts as healthy."
    )
    hold_off: Annotated[int, Duration("30s", "100ms", "1h")] = Field(
        30_000 * MS,
        description="How long a device must be within its bounds to count as healthy again. Doubles with each relapse.",
    )
    hold_off_most: Annotated[int, Duration("30m", "100ms", "24h")] = Field(
        1_800_000 * MS, description="Where the doubling ends."
    )
    clean: Annotated[int, Duration("10m", "100ms", "24h")] = Field(
        600_000 * MS, description="How long a device must show no fatal XID before it may be used again."
    )
    forgive: Annotated[int, Duration("10m", "100ms", "24h")] = Field(
        600_000 * MS, description="One relapse is forgotten for each such time of good health."
    )


class PolicySection(Section):
    """The whole file."""

    version: Annotated[int, Version(VERSION)] = Field(description="The version of this format.")
    enforce: Annotated[bool, Flag()] = Field(
        False, description="false: decide and log, and do nothing to any workload."
    )
    online: list[OnlineSection] = Field(default=[], description="Rules for containers with a latency promise.")
    offline: list[OfflineSection] = Field(default=[], description="Rules for containers that may be slowed.")
    protect: list[MatchSection] = Field(
        default=[], description="Containers and units that are never touched, whatever the rules say."
    )
    annotations: AnnotationsSection = Field(
        default_factory=lambda: AnnotationsSection.model_validate({}),
        description="Whose pods may say by annotations what they are. Left out: nobody's.",
    )
    health: list[HealthSection] = Field(
        default=[], description="When devices are fit for offline work; the first entry that names a device counts."
    )
    tuning: TuningSection = Field(
        default_factory=lambda: TuningSection.model_validate({}), description="The control loop's own times."
    )
