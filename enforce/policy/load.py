# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A policy, read and checked in one pass: a Policy, or every mistake in it.

From the validated sections to the frozen model one line a field decides nothing: what may be written is the schema's
to say, and `crosschecks` has refused what no single key shows.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from agent.config.validation import Checked, read_text, write_checked
from agent.core.errors import PolicyError
from enforce.policy import model, schema
from enforce.policy.crosschecks import crosschecks
from enforce.policy.model import Policy


def policy(section: schema.PolicySection) -> model.Policy:
    """The whole file."""
    return model.Policy(
        enforce=section.enforce,
        online=tuple(online(rule) for rule in section.online),
        offline=tuple(offline(rule) for rule in section.offline),
        protect=tuple(_match(match) for match in section.protect),
        tuning=_tuning(section.tuning),
        health=tuple(_health(rule) for rule in section.health),
        annotations=_annotations(section.annotations),
        pcie=model.Pcie(section.pcie.pace, section.pcie.bandwidth),
        periodic=tuple(periodic(rule) for rule in section.periodic),
    )


def online(rule: schema.OnlineSection) -> model.OnlineRule:
    """A rule with a promise."""
    slo = model.Slo(
        signal=rule.slo.signal,
        quantile=rule.slo.quantile,
        target_ns=rule.slo.target,
        window_ns=rule.slo.window,
        min_samples=rule.slo.min_samples,
        source=_source(rule.slo),
    )
    if (also := rule.slo.also) is not None:
        slo = replace(slo, also=replace(slo, quantile=also.quantile, target_ns=also.target))
    return model.OnlineRule(name=rule.name, match=_match(rule.match), slo=slo, reserve_bytes=rule.reserve)


def _source(slo: schema.SloSection) -> model.Source | None:
    """`crosschecks` has seen to it that the signal's keys are there, and no other's."""
    if slo.signal == "http" and slo.port is not None:
        return model.HttpSource(slo.port, slo.path, tuple(sorted({int(one) for one in slo.status if one.isdigit()})))
    if slo.signal == "prometheus" and slo.url is not None and slo.metric is not None:
        return model.PrometheusSource(slo.url, slo.metric, _labels(slo.labels), model.UNITS_NS[slo.unit])
    if slo.signal == "uprobe" and slo.binary is not None:
        return model.UprobeSource(slo.binary, slo.symbol, slo.offset, slo.nothrow)
    return None


def _labels(labels: dict[str, list[str]] | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(patterns)) for name, patterns in sorted((labels or {}).items()))


def offline(rule: schema.OfflineSection) -> model.OfflineRule:
    """A rule for who may be slowed."""
    limits = model.Limits(
        memory_bytes=rule.limits.memory,
        floor_ratio=rule.limits.floor,
        max_pause_ns=rule.limits.max_pause,
        max_queued_ns=rule.limits.max_queued,
        max_hold_ns=rule.limits.max_hold,
        evict_grace_ns=rule.limits.evict_grace,
    )
    return model.OfflineRule(
        name=rule.name,
        match=_match(rule.match),
        law=rule.law,
        share_ratio=rule.share,
        weight=rule.weight,
        limits=limits,
        ladder=tuple(rule.ladder),
        unprobed=rule.unprobed,
    )


def periodic(rule: schema.PeriodicSection) -> model.PeriodicRule:
    """A rule for requests with deadlines."""
    deadline = rule.period if rule.deadline is None else rule.deadline
    return model.PeriodicRule(rule.name, _match(rule.match), rule.period, deadline, rule.max_pause)


def _match(match: schema.MatchSection) -> model.Match:
    return model.Match(
        namespace=tuple(match.namespace or ()),
        pod=tuple(match.pod or ()),
        container=tuple(match.container or ()),
        image=tuple(match.image or ()),
        labels=_labels(match.labels),
        unit=tuple(match.unit or ()),
        cgroup=tuple(match.cgroup or ()),
        user=tuple(match.user or ()),
        command=tuple(match.command or ()),
    )


def _annotations(section: schema.AnnotationsSection) -> model.Annotations:
    return model.Annotations(
        online=tuple(section.online or ()),
        offline=tuple(section.offline or ()),
        periodic=tuple(section.periodic or ()),
    )


def _tuning(tuning: schema.TuningSection) -> model.Tuning:
    return model.Tuning(
        decide_interval_ns=tuning.decide_interval,
        gate_hold_ns=tuning.gate_hold,
        gate_open_delay_ns=tuning.gate_open_delay,
        no_data_hold_ns=tuning.no_data_hold,
        tgs_sample_ns=tuning.tgs_sample,
    )


def _health(rule: schema.HealthSection) -> model.HealthRule:
    return model.HealthRule(
        devices=tuple(rule.devices or ("*",)),
        unhealthy=_bounds(rule.unhealthy),
        overlimit=_bounds(rule.overlimit),
        patience_ns=rule.patience,
        init_ns=rule.init,
        hold_off_ns=rule.hold_off,
        hold_off_most_ns=rule.hold_off_most,
        clean_ns=rule.clean,
        forgive_ns=rule.forgive,
    )


def _bounds(bounds: schema.BoundsSection) -> model.Bounds:
    return model.Bounds(
        utilization_ratio=bounds.utilization,
        sm_activity_ratio=bounds.sm_activity,
        memory_ratio=bounds.memory,
        sm_clock_hertz=bounds.sm_clock * 1e6 if bounds.sm_clock is not None else None,
    )


def load(path: str | os.PathLike[str], strict_permissions: bool = False) -> Policy:
    """The policy in a file. Raises PolicyError. `strict_permissions` (the agent) refuses one others can write."""
    return check_file(path, strict_permissions).accepted()


def parse(text: str, name: str) -> Policy:
    """The policy in a text; messages call it `name`. Raises PolicyError with all mistakes, in file order."""
    return check_text(text, name).accepted()


def check_file(path: str | os.PathLike[str], strict_permissions: bool = False) -> Checked[Policy]:
    """The policy in a file, or its mistakes. Never raises: that it cannot be read is a mistake too."""
    name, read = os.fspath(path), read_text(path, strict_permissions)
    if read.problem is not None:
        return Checked(name, PolicyError, (read.problem,), was_read=read.was_read)
    return replace(check_text(read.text, name), exposed=read.exposed)


def check_text(text: str, name: str) -> Checked[Policy]:
    """The policy in a text, or its mistakes; messages call it `name`."""
    section, source, problems = schema.FORMAT.parse(text)
    if source.data is not None:
        problems += crosschecks(source)
    made = policy(section) if section is not None and not problems else None
    return Checked(name, PolicyError, tuple(sorted(problems)), made, text, source)


if __name__ == "__main__":  # check_apart: for the agent, which refuses a file that others can write
    write_checked(check_file(sys.argv[1], strict_permissions=True))
