# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is cached about names, for how long, and how much of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.containers.identity import POD_UID, Names, applied, bounded, identify
from agent.containers.naming import NameCache, Naming
from agent.containers.runtimes import BUILTIN, KINDS, KUBELET, Breaker, LookupOutcome, Socket, SocketClient, sockets
from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SourceError, SourceTimeoutError, UsageError
from agent.core.model import Container

A = "3f29c1a7" * 8
UID = "8dbc5577-d0e2-4706-8787-57d52c03ddf2"
IT = identify(f"/docker/{A}")


def other(number: int) -> Container:
    return identify(f"/docker/{number:064x}")


def test_a_container_that_no_runtime_knows_is_looked_up_ever_more_rarely() -> None:
    cache, now = NameCache(), 0
    waits = []
    for _ in range(8):
        assert cache.due(IT, now)
        cache.miss(IT, now, all_answered=True)
        before = now
        while not cache.due(IT, now):
            now += NS_PER_SECOND
        waits.append((now - before) // NS_PER_SECOND)
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]


def test_when_a_runtime_did_not_answer_it_is_looked_up_again_soon() -> None:
    cache = NameCache()
    for now in (0, 100 * NS_PER_SECOND, 200 * NS_PER_SECOND):
        cache.miss(IT, now, all_answered=False)
        assert not cache.due(IT, now + 10 * NS_PER_SECOND - 1)
        assert cache.due(IT, now + 10 * NS_PER_SECOND)


def test_a_name_that_was_learnt_is_given_as_the_same_object() -> None:
    cache = NameCache()
    cache.miss(IT, 0, all_answered=True)
    cache.learn(IT, Names("web", image="nginx"))
    named = cache.named(IT)
    assert named
    assert (named.name, named.image, named.key, named.id, named.cgroup) == ("web", "nginx", IT.key, A, IT.cgroup)
    assert cache.named(IT) is cache.named(named) is named


def test_what_is_cached_is_bounded_and_what_is_in_use_stays() -> None:
    cache = NameCache(most=10)
    cache.learn(IT, Names("web"))
    for number in range(100):
        cache.learn(other(number), Names("other"))
        cache.miss(other(1000 + number), 0, all_answered=True)
        assert cache.named(IT)
    assert len(cache) == 20
    assert cache.named(other(0)) is None
    assert cache.due(other(1000), 0)


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
        (SourceTimeoutError("late"), LookupOutcome.TIMEOUT),
        (SourceError("broken"), LookupOutcome.ERROR),
        (ZeroDivisionError("unexpected"), LookupOutcome.ERROR),
    ],
)
def test_every_question_ends_in_an_outcome_that_is_counted(
    tmp_path: Path, complaint: Exception, outcome: LookupOutcome
) -> None:
    def fail(source: Nothing, deadline_ns: int) -> Names:
        raise complaint

    now = 0
    with socket.socket(socket.AF_UNIX) as server:
        client = SocketClient(Socket("docker", str(tmp_path / "s")), Nothing, NS_PER_SECOND, lambda: now)
        assert client.query(fail) == (LookupOutcome.ABSENT, None)
        server.bind(str(tmp_path / "s"))
        assert client.query(fail) == (outcome, None)
        assert client.query(fail) == (LookupOutcome.HELD_BACK, None)
        now = NS_PER_SECOND
        assert client.query(lambda source, deadline_ns: Names("web")) == (LookupOutcome.FOUND, Names("web"))
        assert client.query(lambda source, deadline_ns: None) == (LookupOutcome.UNKNOWN, None)
    assert {key: count for key, count in client.counts().items() if count} == {
        outcome: 1,
        LookupOutcome.FOUND: 1,
        LookupOutcome.UNKNOWN: 1,
    }
    client.close()
    assert client.query(lambda source, deadline_ns: Names("web")) == (LookupOutcome.ERROR, None)


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


def test_a_step_looks_up_one_container_and_returns_when_the_next_step_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Naming, "_look_up", lambda *_: (Names("web"), True))
    naming = Naming([], clock=lambda: 0)  # not entered: no thread runs
    naming.named(IT)
    naming.named(other(1))
    assert naming._step() == 0.0
    assert [naming.named(IT).name, naming.named(other(1)).name] == ["web", other(1).name]
    assert naming._step() == 30.0
    assert naming.named(other(1)).name == "web"


def test_no_more_questions_wait_than_can_be_cached() -> None:
    naming = Naming([Socket("docker", "/nowhere")])  # not entered: no thread runs
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
def test_an_extra_socket_that_is_written_wrongly_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(UsageError, match="KIND=/PATH/TO/SOCKET, KIND being one of docker, podman, cri"):
        sockets([text])
