# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is called an overlap of two matches is one."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.model import Container, ContainerKey
from enforce.policy.matching import covers
from enforce.policy.model import ContainerFacts, Match

CHARACTERS = "ab*[]!"
NAMES = ["".join(name) for length in (1, 2, 3) for name in product(CHARACTERS, repeat=length)]
PATTERNS = st.lists(st.text(CHARACTERS + "?-", min_size=1, max_size=4), min_size=1, max_size=2).map(tuple)


def pod(name: str) -> ContainerFacts:
    return ContainerFacts(Container(ContainerKey("k"), "n", "containerd", pod=name))


@settings(max_examples=300, deadline=None)
@given(PATTERNS, PATTERNS)
def test_what_fits_the_narrow_match_fits_the_one_that_covers_it(wide: tuple[str, ...], narrow: tuple[str, ...]) -> None:
    outer, inner = Match(pod=wide), Match(pod=narrow)
    if covers(outer, inner):
        fitting = [name for name in NAMES if inner.fits(pod(name), every_process=True)]
        assert all(outer.fits(pod(name), every_process=True) for name in fitting)


def test_a_match_covers_itself_and_what_has_one_key_more() -> None:
    wide = Match(namespace=("serving", "chat-*"))
    assert covers(wide, wide)
    assert covers(wide, Match(namespace=("chat-1",), pod=("*",)))
    assert not covers(Match(namespace=("chat-1",), pod=("*",)), wide)


def test_labels_are_covered_one_by_one() -> None:
    wide = Match(labels=(("app", ("chat", "ra*")),))
    assert covers(wide, Match(labels=(("app", ("chat",)), ("tier", ("1",)))))
    assert not covers(wide, Match(labels=(("app", ("chat", "x")),)))
    assert not covers(wide, Match(labels=(("tier", ("1",)),)))
