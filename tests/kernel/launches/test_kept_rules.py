# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A thread keeps its process's rule until the rules' number changes, and never for longer than a second."""

from __future__ import annotations

import pytest

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.model import ContainerKey
from agent.probes.abi import ROLE_OFFLINE, RULE_PACE, Payer, ProcessKey, Rule
from agent.probes.libcuda import LibcudaProbes
from enforce.actuators.launch.pace import PaceRules
from enforce.model import Level, Target
from tests.support.programs.driver import Driver, launched
from tools.harness.wait import until

LAUNCH = "launch:1x1x1:32x1x1"
LAUNCH_NS = 1000


def charged_ns(probes: LibcudaProbes, driver: Driver, idle_ms: int, *, by_agent: bool, number: int) -> tuple[int, int]:
    """What the launch after the rule was charged, and how long after the one before it came, at most."""
    control = probes.map("controls").share(1)[0]
    pace = PaceRules(probes.map("rules"), probes.map("payers"), control)
    control.rules = number
    with driver.start(LAUNCH, f"idle:{idle_ms}", LAUNCH) as driven:
        key, began_ns = ProcessKey.of(driven.process), monotonic_ns()
        driven.begin()
        until(lambda: bool(launched(probes, driven.process)), "the first launch", step_seconds=0.001)
        if by_agent:
            level = Level(pace=True, share_ratio=0.5, launch_ns=LAUNCH_NS, max_queued_ns=NS_PER_SECOND)
            pace.apply(Target(driven.process, ContainerKey("made up"), (0,), 0), level)
        else:
            rule = Rule(role=ROLE_OFFLINE, flags=RULE_PACE, launch_ns=LAUNCH_NS, max_queued_ns=NS_PER_SECOND)
            probes.map("rules").put(key, rule)
        driven.finish()
        lasted_ns, found = monotonic_ns() - began_ns, probes.map("paces").get(key)
    assert sum(launches for launches, _, _ in launched(probes, driven.process).values()) == 2
    return (found.charged_ns if found else 0), lasted_ns


@pytest.mark.parametrize("number", [0, 7])
def test_what_the_agent_writes_is_the_rule_of_the_next_launch(
    driver: Driver, own_probes: LibcudaProbes, number: int
) -> None:
    assert charged_ns(own_probes, driver, 300, by_agent=True, number=number)[0] == LAUNCH_NS


def test_rules_of_the_agents_next_policy_have_numbers_of_their_own(own_probes: LibcudaProbes) -> None:
    control, seen = own_probes.map("controls").share(1)[0], []
    for _ in range(3):
        PaceRules(own_probes.map("rules"), own_probes.map("payers"), control)
        seen.append(int(control.rules))
    assert len(set(seen)) == 3


def test_where_no_number_was_written_rules_are_looked_at_each_time(driver: Driver, own_probes: LibcudaProbes) -> None:
    assert charged_ns(own_probes, driver, 300, by_agent=False, number=0)[0] == LAUNCH_NS


def test_a_rule_that_was_written_without_a_word_is_seen_within_a_second(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    assert charged_ns(own_probes, driver, 1100, by_agent=False, number=7)[0] == LAUNCH_NS


def test_until_then_the_thread_looks_no_more(driver: Driver, own_probes: LibcudaProbes) -> None:
    charged, lasted_ns = charged_ns(own_probes, driver, 100, by_agent=False, number=7)
    assert charged == 0 or lasted_ns > NS_PER_SECOND  # the machine stood still


def test_a_process_that_is_disowned_is_charged_to_nothing_that_forked_it(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    rules, payers = own_probes.map("rules"), own_probes.map("payers")
    pace = PaceRules(rules, payers, own_probes.map("controls").share(1)[0])
    parent = ProcessKey(1 << 22, 7)
    rule = Rule(role=ROLE_OFFLINE, flags=RULE_PACE, launch_ns=LAUNCH_NS, max_queued_ns=NS_PER_SECOND)
    rules.put(parent, rule)
    try:
        with driver.start("exec", "threads=0", LAUNCH, "idle:2000", LAUNCH) as before:
            key = ProcessKey.of(before.process)
            payers.put(key, Payer(parent, monotonic_ns(), rule))  # as the kernel does at a fork
            before.begin()
            driven = before.again()
            driven.begin()
            until(lambda: bool(launched(own_probes, driven.process)), "the first launch", step_seconds=0.001)
            pace.disown(driven.process)
            driven.finish()
            assert sum(launches for launches, _, _ in launched(own_probes, driven.process).values()) == 2
        charged = own_probes.map("paces").get(parent)
        assert charged is not None
        assert charged.charged_ns == LAUNCH_NS
    finally:
        rules.delete(parent)
        own_probes.map("paces").delete(parent)
