# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Passwords of the web configuration: which users are admitted, what a check costs, and what guessing cannot do."""

from __future__ import annotations

import base64
import threading
import time

import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.exporters.web import auth
from agent.exporters.web.auth import AccessDecision, Passwords


def hashed(password: bytes, cost: int = 4) -> str:
    return bcrypt.hashpw(password, bcrypt.gensalt(cost)).decode()


SESAME = hashed("öpen sesame".encode())


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def looks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The hashes that passwords are compared with from now on."""
    seen: list[bytes] = []
    compare = auth._matches

    def counted(password: bytes, one: bytes) -> bool:
        seen.append(one)
        return compare(password, one)

    monkeypatch.setattr(auth, "_matches", counted)
    return seen


def test_the_right_one_comes_in_and_no_other() -> None:
    known = Passwords({"alice": SESAME})
    assert known.verdict(basic("alice", "öpen sesame")) is AccessDecision.RIGHT
    for user, password in (("alice", "open sesame"), ("alice", ""), ("bob", "öpen sesame"), ("", ""), ("ALICE", "x")):
        assert known.verdict(basic(user, password)) is AccessDecision.WRONG
    assert known.verdict(None) is AccessDecision.NONE


@pytest.mark.parametrize("prefix", ["$2a$", "$2b$", "$2y$"])
def test_hashes_of_htpasswd_and_of_others_are_taken(prefix: str) -> None:
    known = Passwords({"alice": SESAME.replace("$2b$", prefix)})
    assert known.verdict(basic("alice", "öpen sesame")) is AccessDecision.RIGHT


@pytest.mark.parametrize(
    "header", ["", "Basic", "Basic ", "Basic !!!", "Bearer abc", "Basic YWxpY2U=", "Basic " + "A" * 4000, "basic\x00"]
)
def test_what_is_no_basic_authentication_is_wrong(header: str) -> None:
    assert Passwords({"alice": SESAME}).verdict(header) is AccessDecision.WRONG


@settings(max_examples=30)
@given(st.binary(max_size=100))
def test_no_bytes_are_a_fault(raw: bytes) -> None:
    known = Passwords({"alice": SESAME})
    known._next_check = 0.0
    verdict = known.verdict("Basic " + base64.b64encode(b"alice:" + raw).decode())
    assert verdict is (AccessDecision.RIGHT if raw == "öpen sesame".encode() else AccessDecision.WRONG)


def test_what_bcrypt_would_cut_off_counts() -> None:
    known = Passwords({"alice": hashed(b"x" * 72)})
    assert known.verdict(basic("alice", "x" * 72)) is AccessDecision.RIGHT
    assert known.verdict(basic("alice", "x" * 73)) is AccessDecision.WRONG
    assert known.verdict(basic("alice", "x" * 71 + "\0")) is AccessDecision.WRONG


def test_a_scrape_whose_password_was_right_before_costs_no_bcrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, known = looks(monkeypatch), Passwords({"alice": SESAME})
    for _ in range(5):
        assert known.verdict(basic("alice", "öpen sesame")) is AccessDecision.RIGHT
    assert len(seen) == 1
    assert known.verdict(basic("alice", "wrong")) is AccessDecision.WRONG
    assert known.verdict(basic("alice", "öpen sesame")) is AccessDecision.RIGHT
    assert len(seen) == 2, "a user that was right before stays known"
    assert b"sesame" not in b"".join(known._known.values())


def test_what_is_remembered_is_bounded_by_users() -> None:
    known = Passwords({"alice": SESAME, "bob": SESAME})
    for number in range(20):
        known.verdict(basic(f"unknown{number}", "öpen sesame"))
        known.verdict(basic("bob", "öpen sesame"))
    assert list(known._known) == [b"bob"]


def test_an_unknown_user_costs_a_bcrypt_of_a_cost_that_users_have(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, known = looks(monkeypatch), Passwords({"alice": hashed(b"a", 4), "bob": hashed(b"b", 5)})
    for number in range(24):
        assert known.verdict(basic(f"unknown{number}", "x")) is AccessDecision.WRONG
    assert {one[4:6] for one in seen} == {b"04", b"05"}
    assert len(seen) == 24
    known.verdict(basic("unknown0", "y"))
    assert seen[-1][4:6] == seen[0][4:6], "asked again, it is the same"
    assert all(len(one) == 60 for one in seen)


def test_guessing_passwords_takes_a_quarter_of_a_core_and_known_users_are_admitted_meanwhile() -> None:
    known = Passwords({"alice": hashed(b"right", 6)})
    assert known.verdict(basic("alice", "right")) is AccessDecision.RIGHT
    ends = time.monotonic() + 1.5
    tried = [0] * 8

    def attack(number: int) -> None:
        while time.monotonic() < ends:
            known.verdict(basic("alice", f"wrong{number}"))
            tried[number] += 1

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(len(tried))]
    began, began_cpu = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    slowest = 0.0
    while time.monotonic() < ends:
        asked = time.monotonic()
        assert known.verdict(basic("alice", "right")) is AccessDecision.RIGHT
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert sum(tried) > 5
    assert (time.process_time() - began_cpu) / (time.monotonic() - began) < 0.5
    assert slowest < 0.5


def test_no_request_waits_for_long_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "WAIT_SECONDS", 0.05)
    known = Passwords({"alice": SESAME})
    with known._checking:
        assert known.verdict(basic("alice", "öpen sesame")) is AccessDecision.BUSY
    assert known.verdict(basic("alice", "öpen sesame")) is AccessDecision.RIGHT
