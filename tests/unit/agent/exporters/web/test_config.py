# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A web configuration: every key of the exporter-toolkit's is applied or refused, and no secret is ever repeated."""

from __future__ import annotations

import json
import logging
import os
import time
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.config import trusted_file, validation
from agent.config.validation import Checked
from agent.core.errors import WebConfigError
from agent.exporters.web.auth import AccessRules
from agent.exporters.web.config import WebConfigFile, check_file
from agent.exporters.web.schema import HEADERS, WebSection
from gpuwarden.check import check_web_config
from gpuwarden.main import main

HASH = "$2b$04$abcdefghijklmnopqrstuuJKiIQS8r1AI4tJZ5vpm8wbkoKFvnQWq"
USERS = f"basic_auth_users: {{alice: '{HASH}'}}\n"
KEY_BLOCK = "-----BEGIN PRIVATE KEY-----\\nVERYSECRET\\n-----END PRIVATE KEY-----\\n"
MINE = {"cert_file": "c.pem", "key_file": "k.pem"}


def checked(tmp_path: Path, text: str) -> Checked[AccessRules]:
    path = tmp_path / "web.yml"
    path.write_text(text)
    path.chmod(0o600)
    return check_file(path)


def mistakes(tmp_path: Path, text: str) -> list[tuple[int, str]]:
    return [(problem.place.line, problem.text) for problem in checked(tmp_path, text).problems]


def tls(**keys: object) -> str:
    return "tls_server_config:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in keys.items())


def test_passwords_and_headers_need_no_tls(tmp_path: Path) -> None:
    text = USERS + "http_server_config:\n  http2: false\n  headers: {X-Frame-Options: deny, X-XSS-Protection: ''}\n"
    terms = checked(tmp_path, text).accepted()
    assert terms.context is None
    assert terms.passwords is not None
    assert terms.is_restricted
    assert terms.headers == (("X-Frame-Options", "deny"),), "what is blank is not set"
    assert str(terms) == "no TLS, 1 user"


@pytest.mark.parametrize("name", HEADERS)
def test_each_header_of_the_format_can_be_set(tmp_path: Path, name: str) -> None:
    value = (HEADERS[name] or ("max-age=5",))[0]
    terms = checked(tmp_path, f"http_server_config: {{headers: {{{name}: {value}}}}}\n").accepted()
    assert terms.headers == ((name, value),)


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ({"client_auth_type": "RequestClientCert"}, "client_auth_type", "write RequireAndVerifyClientCert"),
        ({"client_auth_type": "RequireAnyClientCert"}, "client_auth_type", "lets in any certificate"),
        ({"client_auth_type": "RequireClientCert"}, "client_auth_type", "lets in any certificate"),
        ({"client_auth_type": "sometimes"}, "client_auth_type", "NoClientCert, VerifyClientCertIfGiven, Require"),
        ({"client_auth_type": "RequireAndVerifyClientCert"}, "client_auth_type", "write client_ca_file"),
        ({"client_auth_type": "VerifyClientCertIfGiven"}, "client_auth_type", "write client_ca_file"),
        ({"client_allowed_sans": ["a"]}, "client_allowed_sans", "must be shown"),
        ({"client_allowed_sans": []}, "client_allowed_sans", "has no value"),
        ({"client_allowed_sans": "a"}, "client_allowed_sans", "is not a list"),
        ({"client_ca": "x"}, "client_ca", "none is asked for"),
        ({"client_ca_file": "none.pem"}, "client_ca_file", "cannot be read (No such file"),
        ({"client_ca_file": ""}, "client_ca_file", "has no value"),
        ({"min_version": "TLS10"}, "min_version", "write TLS12"),
        ({"max_version": "TLS11"}, "max_version", "write TLS12"),
        ({"min_version": "TLS14"}, "min_version", "write one of TLS12, TLS13"),
        ({"min_version": "TLS13", "max_version": "TLS12"}, "min_version", "later than max_version"),
        ({"cipher_suites": []}, "cipher_suites", "has no value"),
        ({"cipher_suites": ["TLS_RSA_WITH_RC4_128_SHA"]}, "cipher_suites", "no suite of Go's"),
        (
            {"cipher_suites": ["TLS_ECDHE_RSA_WITH_AES_128_GCM"]},
            "cipher_suites",
            "did you mean TLS_ECDHE_RSA_WITH_AES_12",
        ),
        ({"cipher_suites": ["TLS_AES_128_GCM_SHA256"]}, "cipher_suites", "all or none"),
        (
            {"cipher_suites": ["TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"]},
            "cipher_suites",
            "write min_version: TLS13",
        ),
        (
            {"cipher_suites": ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"], "min_version": "TLS13"},
            "cipher_suites",
            "min_version is TLS13",
        ),
        ({"curve_preferences": ["CurveP256", "X25519"]}, "curve_preferences", "one curve"),
        ({"curve_preferences": ["CurveP999"]}, "curve_preferences", "unknown"),
        ({"prefer_server_cipher_suites": "no"}, "prefer_server_cipher_suites", "neither true nor false"),
        ({"min_versoin": "TLS12"}, "min_versoin", "did you mean min_version?"),
        ({"cert": "x"}, "cert", "is here and in cert_file"),
        ({"key": "x"}, "key", "is here and in key_file"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_line_and_what_to_write(
    tmp_path: Path, keys: dict[str, object], key: str, expected: str
) -> None:
    text = "http_server_config: {http2: false}\n" + tls(**MINE, **keys)
    line = next(number for number, one in enumerate(text.split("\n"), 1) if one.startswith(f"  {key}:"))
    found = [
        text for at, text in mistakes(tmp_path, text) if at == line and text.startswith(f"tls_server_config.{key}")
    ]
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "the file is empty; write tls_server_config"),
        ("# nothing\n", 1, "the file is empty"),
        ("- a\n", 1, "the file is not a mapping"),
        ("a: [\n", 2, "close the ["),
        ("tls_server_config:\n", 1, "has no value"),
        ("tls_server_config: {}\n", 1, "has no value"),
        ("tls_server_config: 3\n", 1, "is not a mapping"),
        ("tls_server_config: {min_version: TLS12}\n", 1, "tls_server_config.cert is not there; write cert_file: FILE"),
        ("tls_config: {}\n", 1, "did you mean tls_server_config?"),
        ("\nhttp_server_config:\n  http2: true\n", 3, "speaks HTTP/1 only"),
        ("http_server_config:\n  headers:\n    X-Evil: a\n", 3, "X-Evil cannot be set; Content-Security-Policy, "),
        ("http_server_config:\n  headers:\n    X-Frame-Options: allow\n", 3, "write deny or sameorigin"),
        ('http_server_config:\n  headers:\n    X-XSS-Protection: "a\\r\\nb: c"\n', 3, "on one line"),
        ("http_server_config:\n  headers:\n    X-XSS-Protection: ä\n", 3, "in ASCII"),
        ("rate_limit:\n  interval: 1s\n  burst: 3\n", 1, "is not supported"),
        ("basic_auth_users:\n", 1, "has no value"),
        ("basic_auth_users: {}\n", 1, "has no value"),
        ("basic_auth_users:\n  alice: sesame\n", 2, "basic_auth_users.alice has no bcrypt hash; write what `htpasswd"),
        (f"basic_auth_users:\n  alice: '{HASH[:-1]}'\n", 2, "has no bcrypt hash"),
        (f"basic_auth_users:\n  alice: '{HASH.replace('$04', '$31')}'\n", 2, "of cost 31"),
        (f"basic_auth_users:\n  'a:b': '{HASH}'\n", 2, "without a colon"),
        (f"basic_auth_users:\n  '': '{HASH}'\n", 2, "not a name that a client can send"),
        ("basic_auth_users:\n  alice:\n", 2, "is not text"),
        (f"{USERS}{USERS}", 2, "is here twice"),
    ],
)
def test_each_mistake_has_its_line_and_what_to_write(tmp_path: Path, text: str, line: int, expected: str) -> None:
    found = mistakes(tmp_path, text)
    assert [at for at, text in found if expected in text] == [line], found


def test_all_mistakes_are_reported_at_once_in_file_order(tmp_path: Path) -> None:
    text = "basic_auth_users: {a: b}\nhttp_server_config: {http2: 1}\nrate_limit: {}\ntls_server_config: {cert: 3}\n"
    assert [line for line, _ in mistakes(tmp_path, text)] == [2, 3, 4]
    text = "basic_auth_users: {a: b}\nhttp_server_config: {headers: {A: b}}\ntls_server_config: {cert_file: none}\n"
    assert [line for line, _ in mistakes(tmp_path, text)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "text",
    [
        f'tls_server_config: {{cert: a, key: "{KEY_BLOCK}"}}\n',
        f'tls_server_config: {{cert_file: [VERYSECRET], key: "{KEY_BLOCK}", x: 1}}\n',
        "tls_server_config: {key: {VERYSECRET: 1}}\n",
        "basic_auth_users: {alice: VERYSECRET}\n",
        "basic_auth_users: {alice: [VERYSECRET]}\n",
        "basic_auth_users: VERYSECRET\n",
        "basic_auth_users: {alice: '$2b$04$VERYSECRET'\n",
        "basic_auth_users:\n  alice: 'VERYSECRET\n",
        "tls_server_config:\n  key: |\n  VERYSECRET\n",
    ],
)
def test_what_may_be_a_secret_is_never_repeated(tmp_path: Path, text: str) -> None:
    found = mistakes(tmp_path, text)
    assert found
    assert not any("VERYSECRET" in text for _, text in found)
    for as_json in (False, True):
        out = StringIO()
        assert check_web_config(tmp_path / "web.yml", as_json, out) == 2
        assert "VERYSECRET" not in out.getvalue()


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*WebSection.model_fields, "cert", "headers", "http2", "cipher_suites", "x"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_is_written_is_taken_or_refused_and_never_a_fault(
    tmp_path_factory: pytest.TempPathFactory, data: object
) -> None:
    found = checked(tmp_path_factory.getbasetemp(), json.dumps(data))
    assert (found.value is None) is bool(found.problems)
    assert all("; " in problem.text or problem.text.endswith("?") for problem in found.problems), found.problems


@pytest.mark.parametrize(("mode", "expected"), [(0o620, "by its group"), (0o602, "by every user")])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int, expected: str) -> None:
    path = tmp_path / "web.yml"
    path.write_text(USERS)
    path.chmod(mode)
    (problem,) = check_file(path).problems
    assert expected in problem.text
    assert "chmod go-w" in problem.text


def test_a_key_that_others_can_write_is_refused_and_named_where_the_file_names_it(tmp_path: Path) -> None:
    for name in MINE.values():
        (tmp_path / name).write_text("x")
    (tmp_path / "k.pem").chmod(0o606)
    (tmp_path / "c.pem").chmod(0o600)
    found = mistakes(tmp_path, "\n" + tls(**MINE))
    assert [(line, "chmod go-w" in text) for line, text in found] == [(4, True)]


def test_what_is_no_file_or_endless_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + b"\n")
    (tmp_path / "large").chmod(0o600)
    (tmp_path / "bytes").write_bytes(b"a: \xff\n")
    (tmp_path / "bytes").chmod(0o600)
    for name, expected in (
        ("pipe", "not a regular file"),
        ("large", "larger than 1 MiB"),
        ("bytes", "not UTF-8"),
        ("none", "cannot be read (No such file"),
        ("with\0nul", "cannot be read"),
    ):
        (problem,) = check_file(tmp_path / name).problems
        assert expected in problem.text


class Changing:
    """A file that the test changes, long enough ago."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = tmp_path / "web.yml"
        monkeypatch.setattr(validation, "SETTLED_SECONDS", 0.0)
        self.write(USERS)
        self.file = WebConfigFile(self.path)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    def users(self) -> int:
        passwords = self.file.terms().passwords
        return 0 if passwords is None else len(passwords)

    def success(self) -> float:
        return next(value for name, _, value in self.file.rows() if name == "gpuwarden_web_config_reload_success")


@pytest.fixture
def changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Changing:
    return Changing(tmp_path, monkeypatch)


TWO = f"basic_auth_users: {{alice: '{HASH}', bob: '{HASH}'}}\n"


def test_a_changed_file_is_taken_and_the_same_one_is_read_once(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = changing.file.terms()
    with monkeypatch.context() as reading:
        reading.setattr(trusted_file, "read", None)  # any reading fails
        assert changing.file.terms() is first
    changing.write(TWO)
    assert changing.users() == 2


def test_a_broken_file_changes_nothing_and_is_reported_once(
    changing: Changing, caplog: pytest.LogCaptureFixture
) -> None:
    for broken in ("", "tls_server_config: {min_version: TLS10}\n", None):
        if broken is None:
            changing.path.unlink()
        else:
            changing.write(broken)
        caplog.clear()
        assert [changing.users() for _ in range(3)] == [1, 1, 1]
        assert changing.success() == 0
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert "the old one stays in force" in record.getMessage()
        assert str(changing.path) in record.getMessage()
    changing.write(TWO)
    assert (changing.users(), changing.success()) == (2, 1)


def test_a_file_that_may_still_be_written_waits(changing: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "SETTLED_SECONDS", 1.0)
    changing.write(TWO)
    now = changing.path.stat().st_ctime
    for after, users in ((0.1, 1), (0.9, 1), (1.1, 2)):
        monkeypatch.setattr(time, "time", lambda after=after: now + after)
        assert changing.users() == users


def test_a_clock_that_was_set_back_keeps_no_file_waiting(changing: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "SETTLED_SECONDS", 1.0)
    changing.write(TWO)
    now = changing.path.stat().st_ctime
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    assert changing.users() == 2


def test_a_file_that_cannot_be_read_now_is_tried_again(changing: Changing, monkeypatch: pytest.MonkeyPatch) -> None:
    changing.write(TWO)
    with monkeypatch.context() as out_of_descriptors:

        def fails(*_: object) -> bytes:
            raise OSError(24, "Too many open files")

        out_of_descriptors.setattr(trusted_file, "read", fails)
        assert (changing.users(), changing.success()) == (1, 0)
    assert (changing.users(), changing.success()) == (2, 1)


def test_a_wrong_file_at_the_start_is_an_error_with_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text("rate_limit: {a: 1}\nx: 1\n")
    path.chmod(0o600)
    with pytest.raises(WebConfigError) as caught:
        WebConfigFile(path)
    assert [problem.split(":")[1] for problem in caught.value.problems] == ["1", "2"]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        (USERS, 0, "web.yml: ok: no TLS, 1 user\n"),
        ("x: 1\n", 2, "web.yml:1:1: error: x: unknown key; write one of"),
    ],
)
def test_check_reports_what_the_agent_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, expected: str
) -> None:
    path = tmp_path / "web.yml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--web-config", str(path)])
    assert ended.value.code == code
    assert expected in capsys.readouterr().out


def test_check_looks_at_one_thing_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check"], ["check", "a", "--web-config", "b"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "check --web-config FILE" in capsys.readouterr().err
