# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The keys of a policy file: kind, default and meaning of each. docs/policy.md is generated from this file.

pydantic only validates and converts to base units here; the product works with `enforce.policy.model`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from agent.config.sections import FileFormat, SchemaGenerator, Section, mistake, unquoted_mistake
from enforce.policy import model
from enforce.policy.model import LatencySignal, Law, Rung, TimeUnit, Unprobed
from enforce.policy.values import (
    BUCKET_SUFFIX,
    FILE_PATH,
    GLOB,
    METRIC_NAME,
    STATUS_CLASSES,
    SYMBOL_NAME,
    URL,
    URL_PATH,
    Duration,
    Offset,
    Ratio,
    Size,
    public_address,
    rule_name,
    whole_histogram,
)

MS = 1_000_000
VERSION: Final = 1
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000
MOST_POD_WEIGHT = 1
JSON_SCHEMA_DIALECT: Final = "http://json-schema.org/draft-07/schema#"


def _patterns(value: Any) -> Any:
    """One pattern or several: a single one is a list of one. A list that is empty would match nothing."""
    if value in ([], ""):
        raise unquoted_mistake("is empty, which matches nothing", "write a pattern or leave the key out")
    return value if isinstance(value, list) else [value]


def _not_empty(value: Any) -> Any:
    if value in ([], {}):
        raise unquoted_mistake("is empty", "write at least one entry or leave the key out")
    return value


def _version(value: Any) -> Any:
    if type(value) is not int or value != VERSION:  # not True or 1.0, which a Literal takes for 1
        raise mistake("is not a version that this program reads", f"write version: {VERSION}")
    return value


def _labels(value: Any) -> Any:
    if not isinstance(value, dict):
        raise mistake("is not a mapping", "write label names and patterns, such as {app: chat}")
    return _not_empty(value)


_PATTERNS = {"anyOf": [GLOB.json_schema(), {"type": "array", "items": GLOB.json_schema(), "minItems": 1}]}
_LABELS = {"type": "object", "additionalProperties": _PATTERNS, "minProperties": 1}
Patterns = Annotated[list[Annotated[str, GLOB]], BeforeValidator(_patterns), WithJsonSchema(_PATTERNS)]
Labels = Annotated[dict[str, Patterns], BeforeValidator(_labels), WithJsonSchema(_LABELS)]
Url = Annotated[str, URL, AfterValidator(public_address)]
Metric = Annotated[str, METRIC_NAME, AfterValidator(whole_histogram)]
Samples = Annotated[int, Field(ge=1, le=model.MOST_SAMPLES)]
Port = Annotated[int, Field(ge=1, le=65535)]
Megahertz = Annotated[int, Field(ge=1, le=10_000)]
Weight = Annotated[float, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT, allow_inf_nan=False)]


class MatchSection(Section):
    """Which containers a rule matches. All keys that are given must match; at least one must be given."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    namespace: Patterns | None = Field(None, description="Kubernetes namespace of the pod.")
    pod: Patterns | None = Field(None, description="Name of the pod.")
    container: Patterns | None = Field(
        None,
        description="Name of the container, as `gputop` shows it; a short id is none. A name that a user chose "
        "(`NAME@UID`, below that user's slice or directory) counts for offline rules alone.",
    )
    image: Patterns | None = Field(None, description="Image reference, as the runtime writes it.")
    labels: Labels | None = Field(None, description="Label name → pattern. Every label named must exist and match.")
    unit: Patterns | None = Field(
        None,
        description="systemd unit that the processes run in (service or scope), or a slice around it. Below a "
        "service or scope, such as `user@UID.service`, names are the choice of who runs there and do not count: write "
        "`cgroup` there.",
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
    for signal, needed in model.NEEDED_KEYS.items():
        foreign = [key for other, keys in model.SIGNAL_KEYS.items() if other != signal for key in keys]
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


class AlsoSection(Section):
    """A second quantile of the same latency. Offline work gets as much as keeps the stricter of the two."""

    quantile: Annotated[float, Ratio("0.5", inside=True)] = Field(
        description="A quantile below that of `slo`: 0.5 is what most requests take."
    )
    target: Annotated[int, Duration("8ms", "1us", "10m")] = Field(
        description="Upper bound on that quantile, below the target of `slo`."
    )


class SloSection(Section):
    """The latency SLO of an online container. The keys from `port` on belong to one signal each."""

    # More fields than other classes have: one for each key, as the file is flat here.

    model_config = ConfigDict(json_schema_extra={"allOf": _by_signal()})

    signal: LatencySignal = Field(description="Where the latency comes from; see below.")
    quantile: Annotated[float, Ratio("0.99", inside=True)] = Field(
        description="The quantile of the latency that must stay under the target."
    )
    target: Annotated[int, Duration("50ms", "1us", "10m")] = Field(description="Upper bound on that quantile.")
    also: AlsoSection | None = Field(None, description="A second quantile that must be kept too. Left out: none.")
    window: Annotated[int, Duration("10s", "100ms", "1h")] = Field(description="The time window of the quantile.")
    min_samples: Samples = Field(
        20, examples=[20], description="With fewer requests in the window the latency counts as unknown."
    )
    port: Port | None = Field(
        None,
        examples=[8000],
        description="`http` (required): the port that the container listens on, as seen inside it.",
    )
    path: Annotated[str, URL_PATH] | None = Field(
        None, description="`http`: count only requests whose path begins with this. Left out: all requests."
    )
    status: Annotated[str, STATUS_CLASSES] = Field(
        "2xx,3xx",
        description="`http`: only requests with such an answer have a latency, as errors come fast; all are counted.",
    )
    url: Url | None = Field(
        None,
        json_schema_extra={"not": {"pattern": "^[^/]*//[^/]*@|#"}},
        description="`prometheus` (required): the address of the service's metrics.",
    )
    metric: Metric | None = Field(
        None,
        json_schema_extra={"not": {"pattern": f"{BUCKET_SUFFIX}$"}},
        description="`prometheus` (required): the histogram's name, without `_bucket`.",
    )
    labels: Labels | None = Field(
        None, description="`prometheus`: only series with such labels; all that match are added up."
    )
    unit: TimeUnit = Field("s", description="`prometheus`: the unit of the histogram's `le`.")
    binary: Annotated[str, FILE_PATH] | None = Field(
        None, description="`uprobe` (required): the program or library, by its path inside the container."
    )
    symbol: Annotated[str, SYMBOL_NAME] | None = Field(
        None, description="`uprobe`: the function's name as in the file's symbols, mangled if it is. This or `offset`."
    )
    offset: Annotated[int, Offset()] | None = Field(
        None, description="`uprobe`: where the function begins in the file, in bytes. This or `symbol`."
    )
    nothrow: bool = Field(False, description="`uprobe`: true if no exception or panic ever leaves the function.")


class OnlineSection(Section):
    """Containers with a latency SLO. They are never slowed."""

    name: Annotated[str, rule_name("chat")] = Field(description="The rule's name, unique in the file.")
    match: MatchSection = Field(description="Which containers.")
    slo: SloSection = Field(description="Their latency SLO.")
    reserve: Annotated[int, Size("20GiB")] | None = Field(
        None,
        description="Device memory that stays available to each of them, on its devices: offline work may take what is "
        "free beyond that. While none of them runs it is kept free on every device.",
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
        description="Share of the device that is left to it whatever the latency is, as a mean over two seconds: after "
        "a larger share it gets about half a millisecond per `max_pause` until that is used up.",
    )
    max_pause: Annotated[int, Duration("200ms", "1ms", "10s")] = Field(200 * MS, description="Longest single pause.")
    max_queued: Annotated[int, Duration("2ms", "10us", "10s")] | None = Field(
        None,
        description="Upper bound on the GPU work it may have queued. Left out: the law decides, from the SLO's slack.",
    )
    max_hold: Annotated[int, Duration("30s", "100ms", "1h")] = Field(
        30_000 * MS, description="Longest time that an allocation is held until memory is free."
    )
    evict_grace: Annotated[int, Duration("30s", "1s", "1h")] = Field(
        30_000 * MS, description="On eviction, the time between SIGTERM and SIGKILL."
    )


class OfflineSection(Section):
    """Best-effort containers. They may be slowed to meet the SLOs of online containers."""

    model_config = ConfigDict(json_schema_extra=_BY_LAW)

    name: Annotated[str, rule_name("training")] = Field(description="The rule's name, unique in the file.")
    match: MatchSection = Field(description="Which containers.")
    law: Law = Field("headroom", description="How the share is decided.")
    share: Annotated[float, Ratio("30%", above_zero=True)] | None = Field(
        None, description="The share of the device, with `law: fixed` and only there."
    )
    weight: Weight = Field(
        1.0,
        examples=[2],
        description="How the offline share of a device, and where `pcie.pace` is true that of its links, is split "
        "between the containers that want it: by proportion.",
    )
    limits: LimitsSection = Field(
        default_factory=lambda: LimitsSection.model_validate({}), description="Bounds on slowing it, and on its memory."
    )
    ladder: Annotated[list[Rung], BeforeValidator(_not_empty)] = Field(
        default=["gate", "pace", "deny", "hold"],
        json_schema_extra={"minItems": 1},
        description="The actions that may be taken on it, in any order; see below.",
    )
    unprobed: Unprobed = Field(
        "report",
        description="What is done to a container that works on a GPU by NVML without launches that the probes see, "
        "which no launch rule can hold. `report`: a line in the log (metric and alert are there anyway, also with "
        "`ignore`). `freeze`: its cgroup is frozen by turns, within `max_pause` and `floor`, while an online container "
        "on that GPU has requests or misses its SLO. `evict`: it is evicted when that has lasted for 30 s. Neither has "
        "to be in `ladder`.",
    )


class PeriodicSection(Section):
    """Containers with a request once a period and a deadline each. On a device they take turns, the earliest first."""

    name: Annotated[str, rule_name("camera")] = Field(description="The rule's name, unique in the file.")
    match: MatchSection = Field(description="Which containers.")
    period: Annotated[int, Duration("40ms", "1ms", "10s")] = Field(
        description="Least time between the begins of two requests. A request begins with its first launch."
    )
    deadline: Annotated[int, Duration("30ms", "1ms", "10s")] | None = Field(
        None, description="How long after its begin a request is to have ended. Left out: the period."
    )
    max_pause: Annotated[int, Duration("200ms", "1ms", "10s")] = Field(
        200 * MS, description="Longest time that a request is made to wait for its turn."
    )


class AnnotationsSection(Section):
    """Namespaces whose pods may declare their role by annotations, where no rule matches them; see below."""

    offline: Patterns | None = Field(None, description="Namespaces whose pods may declare themselves offline.")
    online: Patterns | None = Field(
        None,
        description="Namespaces whose pods may declare themselves online with an SLO, for which others are slowed.",
    )
    periodic: Patterns | None = Field(None, description="Namespaces whose pods may declare a period and a deadline.")


class PcieSection(Section):
    """Pacing copies between host and device, by their bytes; see below."""

    pace: bool = Field(
        False,
        description="true: a copy of an offline container waits while an online container of the policy copies in the "
        "same direction on that device, and while its container is ahead of others by its `weight`. No wait is longer "
        "than `max_pause`. Containers of `law: off` are left alone.",
    )
    bandwidth: Annotated[int, Size("25GB")] | None = Field(
        None,
        description="What copies get of a device's link in one direction, per second, or a little less: with more, too "
        "many offline copies would be under way. Left out: 75 % of what its generation and width allow, by NVML; where "
        "these are not known, nothing waits.",
    )


class TuningSection(Section):
    """The control loop's own times. The defaults are right unless a measurement says otherwise."""

    decide_interval: Annotated[int, Duration("100ms", "10ms", "10s")] = Field(
        100 * MS,
        description="Time between two decisions; up to 0.4 s where many processes make each take over 5 ms of CPU.",
    )
    gate_hold: Annotated[int, Duration("20ms", "100us", "1s")] = Field(
        20 * MS, description="An online request without a launch for this time counts as finished, and the gate opens."
    )
    gate_open_delay: Annotated[int, Duration("100us", "0ms", "100ms")] = Field(
        MS // 5,
        description="How long the gate stays closed after the last online request, in case another follows unseen.",
    )
    no_data_hold: Annotated[int, Duration("2s", "100ms", "10m")] = Field(
        2_000 * MS,
        description="How long the share is held without a latency reading; then offline work is released.",
    )
    tgs_sample: Annotated[int, Duration("5s", "100ms", "1m")] = Field(
        5_000 * MS, description="How long `law: tgs` counts the online side's blocks before each step."
    )


class BoundsSection(Section):
    """Bounds on a device's readings. An unknown reading exceeds none; a key that is left out is no bound."""

    sm_activity: Annotated[float, Ratio("95%", above_zero=True)] | None = Field(
        None, description="Highest SM activity, on GPUs that report it (Hopper and later)."
    )
    utilization: Annotated[float, Ratio("99%", above_zero=True)] | None = Field(
        None, description="Highest utilisation (share of time with a kernel running), on GPUs that report only that."
    )
    memory: Annotated[float, Ratio("95%", above_zero=True)] | None = Field(
        None, description="Highest share of device memory in use."
    )
    sm_clock: Megahertz | None = Field(
        None, examples=[1200], description="Lowest SM clock in MHz while the device is busy (over 20 %)."
    )


class HealthSection(Section):
    """How the health of devices is assessed. A GPU that is lost or broken (fatal XID) gets no offline work anyway."""

    devices: Patterns | None = Field(None, description="Names or UUIDs of the devices. Left out: all.")
    unhealthy: BoundsSection = Field(
        default_factory=lambda: BoundsSection.model_validate({}),
        description="Beyond these, offline work does not grow, and new offline work gets its floor.",
    )
    overlimit: BoundsSection = Field(
        default_factory=lambda: BoundsSection.model_validate({}),
        description="Beyond these for longer than `patience`, offline work gets its floor and moves up its ladder.",
    )
    patience: Annotated[int, Duration("5s", "0ms", "10m")] = Field(
        5_000 * MS, description="How long the bounds of `overlimit` may be exceeded, or the GPU may not answer."
    )
    init: Annotated[int, Duration("10s", "0ms", "10m")] = Field(
        0, description="How long a device is observed before it counts as healthy."
    )
    hold_off: Annotated[int, Duration("30s", "100ms", "1h")] = Field(
        30_000 * MS,
        description="How long a device must be within its bounds to count as healthy again. Doubles with each relapse.",
    )
    hold_off_most: Annotated[int, Duration("30m", "100ms", "24h")] = Field(
        1_800_000 * MS, description="Upper bound of the doubling."
    )
    clean: Annotated[int, Duration("10m", "100ms", "24h")] = Field(
        600_000 * MS, description="Time without a fatal XID before a device may be used again."
    )
    forgive: Annotated[int, Duration("10m", "100ms", "24h")] = Field(
        600_000 * MS, description="One relapse is forgotten after each such time in health."
    )


class PolicySection(Section):
    """The whole file."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="The version of this format.")
    enforce: bool = Field(False, description="false: decide and log, without acting on any workload.")
    online: list[OnlineSection] = Field(default=[], description="Rules for containers with a latency SLO.")
    offline: list[OfflineSection] = Field(default=[], description="Rules for containers that may be slowed.")
    periodic: list[PeriodicSection] = Field(default=[], description="Rules for containers with periodic deadlines.")
    protect: list[MatchSection] = Field(
        default=[], description="Containers and units that are never acted on, whatever the rules are."
    )
    annotations: AnnotationsSection = Field(
        default_factory=lambda: AnnotationsSection.model_validate({}),
        description="Which pods may declare their role by annotations. Left out: none.",
    )
    health: list[HealthSection] = Field(
        default=[], description="When devices are fit for offline work; the first entry that names a device counts."
    )
    pcie: PcieSection = Field(
        default_factory=lambda: PcieSection.model_validate({}),
        description="Pacing copies between host and device. Left out: they are not paced.",
    )
    tuning: TuningSection = Field(
        default_factory=lambda: TuningSection.model_validate({}), description="The control loop's own times."
    )


FORMAT: Final = FileFormat(
    PolicySection, "the policy", "the policy is empty; write version: 1 and the rules (docs/policy.md has examples)"
)


def json_schema() -> dict[str, Any]:
    """JSON Schema for editors, from the same sections that a policy is checked by. Draft 7: what editors read.

    It completes and explains keys and marks most slips while they are typed; what it cannot say (ranges of durations,
    rules that collide) `gpuwarden check` says.
    """
    made = PolicySection.model_json_schema(by_alias=False, schema_generator=SchemaGenerator)
    return {"$schema": JSON_SCHEMA_DIALECT, **made, "title": "GPU Warden policy"}


def json_schema_page() -> str:
    """The same as text: docs/policy.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _not_above_others(value: Any) -> Any:
    if isinstance(value, (int, float)) and value > MOST_POD_WEIGHT:
        raise mistake("is more than others have", "write up to 1; only the policy file gives more")
    return value


class PodSection(Section):
    """What every pod may declare."""

    role: Literal["online", "offline", "periodic"]  # its annotation is `class`


class OnlinePod(PodSection, SloSection):
    """What an online pod may declare: less than `slo` of the policy."""

    signal: Literal["gpu_wait", "http"]


class OfflinePod(PodSection):
    """What an offline pod may declare."""

    weight: Annotated[
        float,
        Field(ge=LEAST_WEIGHT, le=MOST_POD_WEIGHT, allow_inf_nan=False),
        BeforeValidator(_not_above_others),
    ]


class PeriodicPod(PodSection, PeriodicSection):
    """What a periodic pod may declare."""


PODS: Final[dict[str, type[PodSection]]] = {"online": OnlinePod, "offline": OfflinePod, "periodic": PeriodicPod}
