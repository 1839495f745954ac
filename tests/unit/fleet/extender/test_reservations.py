# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who has which GPU, by what was decided and by what the API server says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.extender.reservations import GPU, NODE, RELEASE_S, Holder, Reservation, Reservations, TakenError, holder

MINE = Reservation("u1", "batch/a", "GPU-1", "n1", 100.0)
SEEN = Holder("u1", "batch/a", "GPU-1", "n1", None, False)


def having(*all_of_them: Reservation) -> Reservations:
    return Reservations({one.uid: one for one in all_of_them})


def test_a_gpu_has_one_pod() -> None:
    with pytest.raises(TakenError):
        having(MINE).reserved(replace(MINE, uid="u2"))
    assert having(MINE).reserved(MINE) == having(MINE)


def test_a_pod_has_one_gpu() -> None:
    with pytest.raises(TakenError):
        having(MINE).reserved(replace(MINE, gpu="GPU-2"))


def test_a_reservation_that_is_not_bound_in_time_expires() -> None:
    found = having(MINE)
    assert found.expired(100.0 + RELEASE_S - 0.1) == ()
    assert found.expired(100.0 + RELEASE_S) == (MINE,)
    assert found.bound("u1", "n1").expired(1e9) == ()


def test_another_attempt_to_bind_may_be_carried_out_as_late_as_the_first() -> None:
    found = having(MINE).renewed("u1", 129.0)
    assert found.expired(100.0 + RELEASE_S) == ()
    assert len(found.expired(129.0 + RELEASE_S)) == 1
    bound = having(replace(MINE, bound=True))
    assert bound.renewed("u1", 129.0) == bound.renewed("u2", 129.0) == bound


def test_after_a_restart_a_bound_pod_has_its_gpu_for_as_long_as_it_runs() -> None:
    found = Reservations().listed([replace(SEEN, node="n1")], 0.0, 5.0)
    assert found.gpus == {"GPU-1"}
    assert found.expired(1e9) == ()
    assert found.seen(replace(SEEN, node="n1", finished=True), 6.0).gpus == frozenset()


def test_after_a_crash_between_the_annotation_and_the_binding_the_gpu_is_reserved_from_when_it_is_seen() -> None:
    found = Reservations().listed([SEEN], 0.0, 50.0)
    assert found.by_pod["u1"] == Reservation("u1", "batch/a", "GPU-1", "n1", 50.0, bound=False, ours=False)
    assert found.expired(50.0 + RELEASE_S - 1) == ()
    assert len(found.expired(50.0 + RELEASE_S)) == 1


def test_a_state_of_the_pod_from_before_the_reservation_does_not_end_it() -> None:
    assert having(MINE).seen(replace(SEEN, gpu=None), 101.0) == having(MINE)
    assert having(MINE).seen(replace(SEEN, gpu="GPU-9"), 101.0) == having(MINE)
    assert having(replace(MINE, bound=True)).seen(SEEN, 101.0) == having(replace(MINE, bound=True))


def test_a_reservation_that_was_seen_ends_when_its_annotation_is_taken_off() -> None:
    seen = Reservations().seen(SEEN, 1.0)
    assert seen.seen(replace(SEEN, gpu=None), 2.0).gpus == frozenset()


def test_a_list_ends_what_is_not_in_it_but_for_what_was_reserved_since_it_was_asked_for() -> None:
    assert having(MINE).listed([], 100.5, 101.0).gpus == frozenset()
    assert having(MINE).listed([], 99.5, 101.0).gpus == {"GPU-1"}


def test_what_another_writer_gave_to_two_pods_is_free_only_when_both_are_gone() -> None:
    both = having(replace(MINE, bound=True)).seen(Holder("u2", "batch/b", "GPU-1", None, "n1", False), 1.0)
    assert both.twice() == {"GPU-1"}
    assert both.released("u1").gpus == {"GPU-1"}
    assert both.released("u1").released("u2").gpus == frozenset()


@pytest.mark.parametrize("document", [None, [], {}, {"metadata": {"name": "x"}}, {"metadata": None, "spec": 1}])
def test_what_is_no_pod_holds_nothing(document: object) -> None:
    assert holder(document) is None


def test_a_pods_document_says_gpu_node_and_whether_it_has_finished() -> None:
    document = {
        "metadata": {"uid": "u1", "name": "a", "annotations": {GPU: "GPU-1", NODE: "n1"}},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Failed"},
    }
    assert holder(document) == Holder("u1", "default/a", "GPU-1", "n1", "n1", True)
