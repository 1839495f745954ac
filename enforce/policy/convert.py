# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From the validated sections to the frozen model. No decisions here: one line a field."""

from __future__ import annotations

from enforce.policy import model, schema, vocabulary


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
    return model.OnlineRule(name=rule.name, match=_match(rule.match), slo=slo, reserve_bytes=rule.reserve)


def _source(slo: schema.SloSection) -> model.Source | None:
    """`crosschecks` has seen to it that the signal's keys are there, and no other's."""
    if slo.signal == "http" and slo.port is not None:
        return model.HttpSource(slo.port, slo.path)
    if slo.signal == "prometheus" and slo.url is not None and slo.metric is not None:
        return model.PrometheusSource(slo.url, slo.metric, _labels(slo.labels), vocabulary.UNITS_NS[slo.unit])
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
    )


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
    return model.Annotations(online=tuple(section.online or ()), offline=tuple(section.offline or ()))


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
