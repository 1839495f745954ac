# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Nobody is stopped of whom the guardian would not hear."""

from __future__ import annotations

import os
import select
import signal

from agent.layout import ROLE_OFFLINE, RULE_PACE, SLOT_NONE, ProcessKey, Rule
from agent.probes import Probes
from agent.procfs import Procfs
from tests.kernel.driven import Driver, lost

LAUNCHES = 3000  # more stops than the ring of stops has room for
FOR_EVER = 1 << 63


def test_when_the_ring_of_stops_is_full_launches_go_through(driver: Driver, fresh_probes: Probes) -> None:
    fresh_probes.ensure(str(driver.libcuda))
    with driver.start(f"{LAUNCHES}*launch:1x1x1:32x1x1") as driven:
        key = ProcessKey.of(driven.process)
        rule = Rule(role=ROLE_OFFLINE, flags=RULE_PACE, rate_ppm=1, max_queued_ns=1, launch_ns=1_000_000_000)
        rule.slots[:] = [SLOT_NONE] * len(rule.slots)
        rule.slot_unknown = SLOT_NONE
        fresh_probes.map("rules").put(key, rule)
        fresh_probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER  # there is no guardian: nobody reads
        driven.begin()
        while not select.select([driven.stdout], [], [], 0)[0]:
            if Procfs().stat(driven.process.tgid).state == "T":
                os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()
        pace = fresh_probes.map("paces").get(key)
    assert pace is not None
    assert 0 < pace.pauses < LAUNCHES - 1
    assert lost(fresh_probes)["event"] == LAUNCHES - 1 - pace.pauses
