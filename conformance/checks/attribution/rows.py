# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows out of a scene: errors of shares by each method, and counts, bytes and memory against the tenants' own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.core.model import Usage
from bench.attribution.errors import MOST_MEAN, MOST_WORST, errors
from bench.attribution.shares import SECONDS, Owner, by_tenant, true_seconds
from conformance.checks.attribution.scene import SceneResult
from conformance.checks.attribution.tenants import Tenant, TenantWork
from conformance.report.model import Row, Verdict, holds, measured, skipped

ITEM: Final = "attribution"
METHODS: Final = {"gpuwarden": "agent", "nvml": "NVML alone", "equal_split": "equal split"}
_OWN_WITHIN: Final = 0.02
_BYTES_WITHIN: Final = 0.01
_SIMULATED_CONTEXT_BYTES: Final = 520 << 20


def of_shares(one: SceneResult, nvml_ended: str | None, why_no_agent: str | None) -> Iterator[Row]:
    """Mean and worst error of each method, and each tenant's share."""
    true = by_tenant(one.recording, true_seconds(one.recording))
    names = {tenant.name for tenant in one.tenants}
    for method, called in METHODS.items():
        whats = [f"{one.name}: {which} error of a container's share, {called}" for which in ("mean", "worst")]
        why = nvml_ended if method == "nvml" else why_no_agent
        if why is not None:
            yield from (skipped(ITEM, what, why) for what in whats)
            continue
        reported = by_tenant(one.recording, SECONDS[method](one.recording))
        found = errors(true, reported, names)
        for what, figure, most in zip(whats, (found.mean_abs, found.worst), (MOST_MEAN, MOST_WORST), strict=True):
            yield _error(what, figure, most, ours=method == "gpuwarden")
        if method == "gpuwarden":
            for tenant in one.tenants:
                yield _share(one, tenant, reported, true)


def of_reckoning(one: SceneResult, simulated: SceneResult) -> Row:
    """Whether kernels × time is the truth where the truth is known."""
    mine = by_tenant(one.recording, true_seconds(one.recording))
    theirs = by_tenant(simulated.recording, true_seconds(simulated.recording))
    worst = errors(theirs, mine, {tenant.name for tenant in one.tenants}).worst
    what = f"{one.name}: worst error of kernels × time against the simulated GPU's truth"
    return holds(
        ITEM, what, worst <= _OWN_WITHIN, round(worst, 4), _OWN_WITHIN, "the truth on a real GPU is reckoned so"
    )


def of_memory(one: SceneResult) -> Iterator[Row]:
    """While they run: NVML's bytes and the probes' against what each allocated."""
    for tenant in one.tenants:
        usage, name = one.usage.get(tenant.name), f"{one.name}: bytes of {tenant.name}"
        if usage is None:
            yield skipped(ITEM, f"{name} by NVML beyond what it allocated", "the agent knows nothing of it")
            continue
        beyond = None if usage.memory_bytes is None else usage.memory_bytes - tenant.allocated_bytes
        note = "its context; the baseline is the simulated GPU's"
        yield measured(
            ITEM, f"{name} by NVML beyond what it allocated", beyond, "bytes", _SIMULATED_CONTEXT_BYTES, note
        )
        live = on_device(usage) - tenant.allocated_bytes
        reported = ", ".join(f"{kind} {size}" for kind, size in sorted(usage.memory_by_kind.items())) or "nothing"
        yield holds(ITEM, f"{name} by the probes beyond what it allocated", live == 0, live, 0, f"live: {reported}")


def of_totals(one: SceneResult, usage: Mapping[str, Usage], tenants: Sequence[Tenant] | None = None) -> Iterator[Row]:
    """After they ended: launches and copied bytes against their own count. `tenants`: only these."""
    for tenant in one.tenants if tenants is None else tenants:
        name, own, reported = tenant.name, one.done[tenant.name], usage.get(tenant.name)
        what = f"{one.name}: launches of {name} that the agent missed"
        if reported is None:
            yield skipped(ITEM, what, "the agent knows nothing of it")
            continue
        missed = own.kernels - reported.totals.launches
        yield holds(ITEM, what, missed == 0, missed, 0, f"{own.kernels} by its own count")
        yield from _copied(one.name, name, own, reported)


def on_device(usage: Usage) -> int:
    """Live device memory by the probes."""
    return sum(size for kind, size in usage.memory_by_kind.items() if kind != "pinned")


def _copied(scene: str, name: str, own: TenantWork, reported: Usage) -> Iterator[Row]:
    ways = (
        ("to", own.to_device_bytes, reported.totals.pcie_rx_bytes),
        ("from", own.from_device_bytes, reported.totals.pcie_tx_bytes),
    )
    for way, own_bytes, agents in ways:
        if own_bytes:
            what = f"{scene}: bytes that {name} copied {way} the device, agent ÷ own"
            ratio = agents / own_bytes
            note = f"{own_bytes} by its own count"
            yield holds(ITEM, what, abs(ratio - 1) <= _BYTES_WITHIN, round(ratio, 4), 1.0, note)


def _error(what: str, figure: float, most: float, *, ours: bool) -> Row:
    if not ours:
        return measured(ITEM, what, figure, "ratio", note="no promise of ours")
    verdict = Verdict.OK if figure <= most else Verdict.DIFFERS
    note = "share of the device; the baseline is the most that it may be"
    return Row(item=ITEM, what=what, verdict=verdict, figure=round(figure, 4), unit="ratio", baseline=most, note=note)


def _share(one: SceneResult, tenant: Tenant, reported: Mapping[Owner, float], true: Mapping[Owner, float]) -> Row:
    owner = next((owner for owner in true if owner.name == tenant.name), Owner(tenant.name, ""))
    usage = one.usage.get(tenant.name)
    error = None if usage is None else usage.sm_error_ratio
    note = "the truth is the baseline" + ("" if error is None else f"; the agent says ± {error:.3f}")
    what = f"{one.name}: share of {tenant.name}, agent"
    return measured(ITEM, what, reported.get(owner, 0.0), "ratio", round(true.get(owner, 0.0), 4), note)
