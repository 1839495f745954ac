# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is done to offline containers whose GPU work has no launches that the probes see: a rung of its own.

Neither gate nor pace can hold such a container, so its rule says by `unprobed` whether it is frozen (by turns, within
the rule's longest pause and floor) or evicted; neither has to be in the rule's ladder, which is climbed for other
reasons. Both only while an online container on a device where it works unseen is in need: it has requests, or its SLO
is missed. The need is held for some seconds, as requests come one by one. Where the rule does not ignore it, the log
has it once.

Invariant: nothing is asked for a container that is not offline, or beside which no online one is in need.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, Snapshot
from agent.core.text import printable
from enforce.actuators.ladder import EVICT_AFTER_NS, Reasons
from enforce.controller.decision import DecisionInputs, slack_ratio
from enforce.policy.model import OnlineRule, Role
from enforce.workloads import Workload, subject_of

_log = logging.getLogger(__name__)
HOLD_NS: Final = 5 * NS_PER_SECOND
UNSEEN: Final = "it works on a GPU without launches that the probes see"


@dataclass(slots=True)
class _Need:
    """Since when, and until when at least, an online container needs the device that one works on unseen."""

    since_ns: int
    until_ns: int


@dataclass(slots=True)
class UnprobedRungs:
    """See the module. For the deciding thread."""

    _needs: dict[ContainerKey, _Need] = field(default_factory=dict)
    _logged: set[ContainerKey] = field(default_factory=set)

    def step(self, snapshot: Snapshot, inputs: DecisionInputs, now_ns: int) -> dict[ContainerKey, Reasons]:
        """Once per decision: rung and reason for each container that has to be frozen or evicted."""
        unseen = _unseen(snapshot)
        subjects = {key: subject_of(inputs.workloads[key]) for key in unseen.keys() & inputs.workloads.keys()}
        rules = {key: subject.rule for key, subject in subjects.items() if subject is not None}
        self._needs = {key: need for key, need in self._needs.items() if key in rules}
        wanted: dict[ContainerKey, Reasons] = {}
        for key, rule in rules.items():
            need = self._need(key, unseen[key], inputs, now_ns)
            if need is None or rule.unprobed not in ("freeze", "evict"):
                continue
            if rule.unprobed == "freeze" or now_ns - need.since_ns >= EVICT_AFTER_NS:
                wanted[key] = {rule.unprobed: UNSEEN}
        self._log({key for key, rule in rules.items() if rule.unprobed != "ignore"}, inputs.workloads)
        return wanted

    def _need(
        self, key: ContainerKey, devices: frozenset[DeviceUuid], inputs: DecisionInputs, now_ns: int
    ) -> _Need | None:
        need = self._needs.get(key)
        if any(_is_in_need(other, devices, inputs) for other in inputs.workloads.values()):
            since_ns = need.since_ns if need is not None else now_ns
            need = self._needs[key] = _Need(since_ns, now_ns + HOLD_NS)
        elif need is not None and now_ns >= need.until_ns:
            del self._needs[key]
            need = None
        return need

    def _log(self, unseen: set[ContainerKey], workloads: Mapping[ContainerKey, Workload]) -> None:
        for key in unseen - self._logged:
            name = printable(workloads[key].container.name, 160)
            _log.warning("%s: unprobed: %s; gate and pace cannot hold it", name, UNSEEN)
        self._logged = unseen


def _unseen(snapshot: Snapshot) -> dict[ContainerKey, frozenset[DeviceUuid]]:
    found = {
        row.container.key: frozenset(device for device, unprobed in row.unprobed.items() if unprobed)
        for row in snapshot.containers
    }
    return {key: devices for key, devices in found.items() if devices}


def _is_in_need(other: Workload, devices: frozenset[DeviceUuid], inputs: DecisionInputs) -> bool:
    """Whether it is online on one of the devices, and has requests or misses its SLO."""
    rule, here = other.classification.rule, other.devices & devices
    if other.classification.role is not Role.ONLINE or not isinstance(rule, OnlineRule) or not here:
        return False
    reading = inputs.readings.get(other.container.key)
    slack = slack_ratio(reading, rule.slo)
    has_requests = reading is not None and reading.recent_samples > 0
    return has_requests or (slack is not None and slack < 0) or any(inputs.busy.get(device) for device in here)
