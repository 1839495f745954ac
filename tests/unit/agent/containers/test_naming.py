# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is remembered about names, for how long, and how much of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import NS_PER_SECOND
from agent.containers.answers import Names, applied, bounded
from agent.containers.asking import Asked, Outcome
from agent.containers.breaker import Breaker
from agent.containers.identity import POD_UID, identify
from agent.containers.naming import Naming
from agent.containers.remembered import Remembered
from agent.containers.sources import BUILTIN, KINDS, KUBELET, Socket, sockets
from agent.errors import SourceError, SourceTimeoutError, UsageError
from agent.model import Container

A = "3f29c1a7" * 8
UID = "8dbc5577-d0e2-4706-8787-57d52c03ddf2"
IT = identify(f"/docker/{A}")


def other(number: int) -> Container:
    return identify(f"/docker/{number:064x}")


def test_a_container_that_nobody_knows_is_asked_for_ever_more_rarely() -> None:
    remembered, now = Remembered(), 0
    waits = []
    for _ in range(8):
        assert remembered.due(IT, now)
        remembered.miss(IT, now, everybody_asked=True)
        before = now
        while not remembered.due(IT, now):
            now += NS_PER_SECOND
        waits.append((now - before) // NS_PER_SECOND)
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]


def test_when_not_everybody_could_be_asked_it_is_asked_for_again_soon() -> None:
    remembered = Remembered()
    for now in (0, 100 * NS_PER_SECOND, 200 * NS_PER_SECOND):
        remembered.miss(IT, now, everybody_asked=False)
        assert not remembered.due(IT, now + 10 * NS_PER_SECOND - 1)
        assert remembered.due(IT, now + 10 * NS_PER_SECOND)


def test_a_name_that_was_learnt_is_given_as_the_same_object() -> None:
    remembered = Remembered()
    remembered.miss(IT, 0, everybody_asked=True)
    remembered.learn(IT, Names("web", image="nginx"))
    named = remembered.named(IT)
    assert named
    assert (named.name, named.image, named.key, named.id, named.cgroup) == ("web", "nginx", IT.key, A, IT.cgroup)
    assert remembered.named(IT) is remembered.named(named) is named


def test_what_is_remembered_is_bounded_and_what_is_in_use_stays() -> None:
    remembered = Remembered(most=10)
    remembered.learn(IT, Names("web"))
    for number in range(100):
        remembered.learn(other(number), Names("other"))
        remembered.miss(other(1000 + number), 0, everybody_asked=True)
        assert remembered.named(IT)
    assert len(remembered) == 20
    assert remembered.named(other(0)) is None
    assert remembered.due(other(1000), 0)


def test_a_socket_is_left_alone_ever_longer_and_forgiven_at_once() -> None:
    breaker, now, waits = Breaker(), 0, []
    for _ in range(9):
        breaker.failed(now)
        waits.append((breaker.silent_until_ns - now) // NS_PER_SECOND)
        assert not breaker.allows(breaker.silent_until_ns - 1)
        now = breaker.silent_until_ns
        assert breaker.allows(now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.succeeded()
    assert breaker.allows(0)
    breaker.failed(0)
    assert breaker.allows(NS_PER_SECOND)


class Nothing:
    """A source that is only opened and closed."""

    def __init__(self, path: str) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("complaint", "outcome"),
    [
        (SourceTimeoutError("late"), Outcome.TIMEOUT),
        (SourceError("broken"), Outcome.ERROR),
        (ZeroDivisionError("nobody thought of it"), Outcome.ERROR),
    ],
)
def test_every_question_ends_in_an_outcome_that_is_counted(
    tmp_path: Path, complaint: Exception, outcome: Outcome
) -> None:
    def fail(source: Nothing, deadline_ns: int) -> Names:
        raise complaint

    now = 0
    with socket.socket(socket.AF_UNIX) as server:
        asked = Asked(Socket("docker", str(tmp_path / "s")), Nothing, NS_PER_SECOND, lambda: now)
        assert asked.ask(fail) == (Outcome.ABSENT, None)
        server.bind(str(tmp_path / "s"))
        assert asked.ask(fail) == (outcome, None)
        assert asked.ask(fail) == (Outcome.HELD_BACK, None)
        now = NS_PER_SECOND
        assert asked.ask(lambda source, deadline_ns: Names("web")) == (Outcome.FOUND, Names("web"))
        assert asked.ask(lambda source, deadline_ns: None) == (Outcome.UNKNOWN, None)
    assert {key: count for key, count in asked.counts().items() if count} == {
        outcome: 1,
        Outcome.FOUND: 1,
        Outcome.UNKNOWN: 1,
    }
    asked.close()
    assert asked.ask(lambda source, deadline_ns: Names("web")) == (Outcome.ERROR, None)


def test_the_cgroup_has_the_last_word_on_the_pod() -> None:
    it = identify(f"/kubepods/pod{UID}/{A}")
    named = applied(Names("web", labels={POD_UID: "another", "app": "chat"}), it)
    assert dict(named.labels) == {POD_UID: UID, "app": "chat"}


def test_a_runtime_that_knows_a_container_without_a_name_leaves_it_its_own() -> None:
    assert applied(Names(image="nginx"), IT).name == IT.name


TEXTS = st.text(max_size=400)


@given(TEXTS, TEXTS | st.none(), TEXTS | st.none(), TEXTS | st.none(), st.dictionaries(TEXTS, TEXTS, max_size=100))
def test_whatever_a_container_calls_itself_is_kept_within_bounds(
    name: str, pod: str | None, namespace: str | None, image: str | None, labels: dict[str, str]
) -> None:
    names = bounded(Names(name, pod, namespace, image, labels))
    texts = [names.name, names.pod or "", names.namespace or "", names.image or "", *names.labels.values()]
    assert all(text.isprintable() for text in (*texts, *names.labels))
    assert len(names.labels) <= 64
    assert sum(map(len, (*texts, *names.labels))) <= 16_384 + 4 * 2600
    assert names == bounded(Names(name, pod, namespace, image, dict(reversed(labels.items()))))


def test_only_what_a_runtime_gave_an_id_is_asked_for() -> None:
    naming = Naming([Socket("docker", "/nowhere")])
    for path in ("/", "/system.slice/ssh.service", "/lxc.payload.web", "/slurm/uid_1/job_2", "/gpuwarden/online"):
        it = identify(path)
        assert naming.named(it) is it
    assert not naming._waiting


def test_no_more_questions_wait_than_can_be_remembered() -> None:
    naming = Naming([Socket("docker", "/nowhere")])  # not entered: nobody answers
    for number in range(5000):
        naming.named(other(number))
        naming.named(other(number))
    assert len(naming._waiting) == 4096
    assert naming.counts()["queue", "refused"] == 2 * (5000 - 4096)


def test_extra_sockets_are_asked_before_the_usual_ones() -> None:
    assert sockets(["cri=/host/run/containerd/containerd.sock"]) == (
        Socket("cri", "/host/run/containerd/containerd.sock"),
        *BUILTIN,
    )
    assert {socket.kind for socket in BUILTIN} == {*KINDS, KUBELET}


@pytest.mark.parametrize("text", ["", "cri", "cri=", "cri=run/x.sock", "rkt=/run/rkt.sock", "/run/docker.sock"])
def test_an_extra_socket_that_is_written_wrongly_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError, match="KIND=/PATH/TO/SOCKET, KIND being one of docker, podman, cri"):
        sockets([text])
