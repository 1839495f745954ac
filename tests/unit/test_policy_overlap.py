# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is called an overlap of two matches is one."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agent.model import Container, ContainerKey
from enforce.policy.model import Facts, Match
from enforce.policy.overlap import covers

PATTERNS = st.lists(st.text("ab*?[]!-", min_size=1, max_size=4), max_size=2).map(tuple)
NAMES = st.text("ab*?[]!-", min_size=1, max_size=4)
MATCHES = st.builds(
    Match,
    namespace=PATTERNS,
    pod=PATTERNS,
    labels=st.dictionaries(st.sampled_from("xy"), PATTERNS.filter(bool), max_size=2).map(lambda it: (*it.items(),)),
)
CONTAINERS = st.builds(
    lambda namespace, pod, labels: Facts(
        Container(ContainerKey("k"), "n", "containerd", namespace=namespace, pod=pod, labels=labels)
    ),
    NAMES | st.none(),
    NAMES | st.none(),
    st.dictionaries(st.sampled_from("xy"), NAMES),
)


@settings(max_examples=300)
@given(MATCHES, MATCHES, st.lists(CONTAINERS, max_size=20))
def test_what_fits_the_narrow_match_fits_the_one_that_covers_it(wide: Match, narrow: Match, them: list[Facts]) -> None:
    assume(covers(wide, narrow))
    for facts in them:
        assert not narrow.fits(facts, every_process=True) or wide.fits(facts, every_process=True)


def test_a_match_covers_itself_and_what_has_one_key_more() -> None:
    wide = Match(namespace=("serving", "chat-*"))
    assert covers(wide, wide)
    assert covers(wide, Match(namespace=("chat-1",), pod=("*",)))
    assert not covers(Match(namespace=("chat-1",), pod=("*",)), wide)
