# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is reported of a wrong policy: every mistake, at its line, with what to write instead."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agent.core.errors import PolicyError
from enforce.policy.load import load, parse

GOOD = """\
version: 1
enforce: true
online:
  - name: chat
    match: {namespace: serving, pod: "chat-*"}
    slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
offline:
  - name: training
    match: {namespace: batch}
"""
PROMETHEUS = "signal: prometheus, url: 'http://a:1/metrics'"


def mistakes(text: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse(text, "p.yaml")
    return caught.value.problems


def only(text: str) -> str:
    found = mistakes(text)
    assert len(found) == 1, found
    return found[0]


def test_five_different_mistakes_get_five_messages_in_file_order() -> None:
    text = GOOD.replace("enforce", "enfroce").replace("gpu_wait", "gpu_weight").replace("0.99", "99")
    text = text.replace("50ms", "50").replace("10s", "ten")
    found = mistakes(text)
    assert [line.split(":")[1] for line in found] == ["2", "6", "6", "6", "6"]
    assert len(found) == 5


def test_every_message_names_file_line_and_what_to_write() -> None:
    text = GOOD.replace("enforce", "enfroce").replace("namespace: batch", "{}").replace("50ms", "-1ms")
    for message in mistakes(text):
        assert re.fullmatch(r"p\.yaml:[0-9]+: .+; .+|p\.yaml:[0-9]+: .+; did you mean .+\?", message), message


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("name: radar, match: {pod: r}", "has no period; write period: 40ms"),
        ("name: radar, match: {pod: r}, period: 40ms, deadline: 50ms", "deadline: is above the period, 40ms"),
        ("name: radar, match: {pod: r}, period: 40", "is a duration without a unit"),
        ("name: chat, match: {pod: r}, period: 40ms", "'chat' is already the name of online[0] on line 4"),
        ("name: radar, match: {namespace: batch}, period: 40ms", "matches the same as offline[0] on line 9"),
        ("name: radar, match: {}, period: 40ms", "an empty match is refused"),
    ],
)
def test_a_periodic_rule_has_a_period_no_longer_deadline_and_a_match_of_its_own(rule: str, expected: str) -> None:
    assert expected in only(f"{GOOD}periodic:\n  - {{{rule}}}\n")


ALSO = "also: {quantile: 0.5, target: 8ms}"


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("enforce: true", "enfroce: true", 2, "did you mean enforce?"),
        ("enforce: true", "enforce: yes", 2, "write true or false"),
        ("enforce: true", "enforce: 1", 2, "write true or false"),
        ("enforce: true", "enforce:", 2, "has no value"),
        ("enforce: true", "frobnicate: 1", 2, "write one of: version, enforce, online"),
        ("version: 1", "version: 2", 1, "write version: 1"),
        ("version: 1", "version: 1.0", 1, "write version: 1"),
        ("version: 1", "version: true", 1, "write version: 1"),
        ("version: 1\n", "", 1, "has no version"),
        ("signal: gpu_wait, ", "", 6, "has no signal; write signal: gpu_wait"),
        ("signal: gpu_wait", "signal: gpu_weight", 6, "write one of: gpu_wait"),
        ("signal: gpu_wait", "signal: http", 6, "signal http has no port; write port: 8000"),
        ("signal: gpu_wait", "signal: gpu_wait, port: 80", 6, "only signal http has port, and this is gpu_wait"),
        ("signal: gpu_wait", "signal: http, port: 80, metric: m", 6, "only signal prometheus has metric"),
        ("signal: gpu_wait", "signal: http, port: 70000", 6, "out of range"),
        ("signal: gpu_wait", "signal: http, port: 80, path: v1", 6, "begin it with /"),
        ("signal: gpu_wait", "signal: prometheus, metric: m", 6, "has no url; write url: http://"),
        ("signal: gpu_wait", f"{PROMETHEUS}, metric: m_bucket", 6, "write m"),
        ("signal: gpu_wait", f"{PROMETHEUS}, metric: a-b", 6, "not a metric's name"),
        ("signal: gpu_wait", f"{PROMETHEUS}, metric: m, unit: h", 6, "write one of: s, ms, us"),
        ("signal: gpu_wait", f"{PROMETHEUS}, metric: m, labels: {{le: '1'}}", 6, "all are needed; remove it"),
        ("signal: gpu_wait", "signal: prometheus, metric: m, url: 'ftp://a/b'", 6, "is not an address"),
        ("signal: gpu_wait", "signal: prometheus, metric: m, url: 'http://a:b/'", 6, "is not an address"),
        ("signal: gpu_wait", "signal: prometheus, metric: m, url: 'http://u:p@a/'", 6, "user name"),
        ("signal: gpu_wait", "signal: uprobe, symbol: f", 6, "has no binary; write binary: /usr"),
        ("signal: gpu_wait", "signal: uprobe, binary: /b", 6, "neither symbol nor offset; write symbol: handle"),
        ("signal: gpu_wait", "signal: uprobe, binary: /b, symbol: f, offset: 26", 6, "remove one of them"),
        ("signal: gpu_wait", "signal: uprobe, binary: b, symbol: f", 6, "is not a file's full path"),
        ("signal: gpu_wait", "signal: uprobe, binary: /b, offset: f", 6, "is not an offset"),
        ("signal: gpu_wait", "signal: uprobe, binary: /b, offset: 0", 6, "out of range"),
        ("signal: gpu_wait", "sginal: gpu_wait", 6, "did you mean signal?"),
        ("quantile: 0.99", "quantile: 1", 6, "between 0 and 1"),
        ("quantile: 0.99", "quantile: 0", 6, "between 0 and 1"),
        ("quantile: 0.99", "quantile: .nan", 6, "between 0 and 1"),
        ("quantile: 0.99", "quantile: .inf", 6, "between 0 and 1"),
        ("quantile: 0.99", "quantile: p99", 6, "between 0 and 1"),
        ("quantile: 0.99", "quantile: true", 6, "between 0 and 1"),
        ("window: 10s", f"window: 10s, {ALSO}".replace("0.5", "0.99"), 6, "also.quantile: is slo.quantile again"),
        (
            "window: 10s",
            f"window: 10s, {ALSO}".replace("0.5", "99.9%"),
            6,
            "also.quantile: 0.999 is above",
        ),
        ("window: 10s", f"window: 10s, {ALSO}".replace("0.5", "1"), 6, "between 0 and 1"),
        ("window: 10s", f"window: 10s, {ALSO}".replace("0.5", "0"), 6, "between 0 and 1"),
        ("window: 10s", f"window: 10s, {ALSO}".replace("8ms", "50ms"), 6, "is not below slo.target, 50ms"),
        ("window: 10s", f"window: 10s, {ALSO}".replace("8ms", "8"), 6, "without a unit"),
        ("window: 10s", "window: 10s, also: {quantile: 0.5}", 6, "has no target; write target: 8ms"),
        ("window: 10s", "window: 10s, also: 8ms", 6, "is not a mapping"),
        ("window: 10s", "window: 10s, also:", 6, "has no value"),
        ("target: 50ms", "target: 0ms", 6, "out of range"),
        ("target: 50ms", "target: -5ms", 6, "out of range"),
        ("target: 50ms", "target: 50", 6, "without a unit"),
        ("target: 50ms", "target: 1:30", 6, "not a duration"),
        ("target: 50ms", "target: 50 msec", 6, "write 50ms"),
        ("target: 50ms", "target: [50ms]", 6, "a list is not a duration"),
        ("window: 10s", "window: 9999999999h", 6, "out of range"),
        ("window: 10s", "window: 10s, min_samples: 1.5", 6, "whole number"),
        ("window: 10s", "window: 10s, min_samples: 0", 6, "out of range"),
        ("namespace: batch", "", 9, "an empty match"),
        ("namespace: batch", "namespace: []", 9, "leave the key out"),
        ("namespace: batch", 'namespace: ""', 9, "leave the key out"),
        ("namespace: batch", "namespace: 7", 9, 'put it in quotes: "7"'),
        ("namespace: batch", "namespace: {a: b}", 9, "is not a pattern"),
        ("namespace: batch", "namespace: ", 9, "has no value"),
        ("namespace: batch", "namespce: batch", 9, "did you mean namespace?"),
        ("namespace: batch", "labels: [a]", 9, "not a mapping"),
        ("namespace: batch", "labels: {}", 9, "is empty"),
        ("namespace: batch", "labels: {app: 1}", 9, 'put it in quotes: "1"'),
        ("namespace: batch", 'pod: "chat-*", namespace: serving', 9, "online[0] on line 5"),
        ("namespace: batch", 'pod: ["chat-*"], namespace: [serving]', 9, "online[0] on line 5"),
        ("name: training", "name: chat", 8, "online[0] on line 4"),
        ("name: training", "name: a b", 8, "is not a name"),
        ("name: training", "name: 7", 8, "put it in quotes"),
        ("name: training", "name: " + "n" * 64, 8, "up to 63"),
        ("  - name: training\n    match: {namespace: batch}", "  name: training", 7, "is not a list"),
        ("  - name: training\n    match: {namespace: batch}", "  - training", 8, "is not a mapping"),
        ("  - name: training\n    match: {namespace: batch}", "", 7, "has no value"),
        ("    match: {namespace: batch}", "    law: headroom", 8, "has no match"),
    ],
)
def test_a_mistake_is_reported_at_its_line(old: str, new: str, line: int, expected: str) -> None:
    assert old in GOOD
    message = only(GOOD.replace(old, new))
    assert message.startswith(f"p.yaml:{line}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("law: head", "write one of: headroom, fixed"),
        ("law: fixed", "write share: 30%"),
        ("share: 30%", "only law fixed has a share"),
        ("{law: fixed, share: 0%}", "above 0"),
        ("{law: fixed, share: 2%}", "below the floor of 5%"),
        ("{law: fixed, share: 10%, limits: {floor: 20%}}", "below the floor of 20%"),
        ("weight: 0", "out of range"),
        ("weight: 0.0009", "write a number from 0.001 to 1000"),
        ("weight: .nan", "out of range"),
        ("weight: heavy", "not a number"),
        ("limits: {memory: 40}", "without a unit"),
        ("limits: {memory: 40Gi}", "write 40GiB"),
        ("limits: {memory: 40gib}", "write 40GiB"),
        ("limits: {memory: 10B}", "out of range"),
        ("limits: {memory: }", "has no value"),
        ("limits: {floor: 5}", "0 to 1"),
        ("limits: {floor: 101%}", "0 to 1"),
        ("limits: {floor: -1%}", "0 to 1"),
        ("limits: {floor: .nan}", "0 to 1"),
        ("limits: {max_pause: 1h}", "out of range"),
        ("limits: 5%", "write the keys memory, floor, max_pause, max_queued"),
        ("limits: [a]", "a list is not a mapping"),
        ("ladder: []", "is empty"),
        ("ladder: pace", "is not a list"),
        ("ladder: [pace, frezze]", "did you mean freeze?"),
        ("ladder: [[pace]]", "is unknown"),
    ],
)
def test_a_mistake_in_an_offline_rule_is_reported_at_its_line(line: str, expected: str) -> None:
    keys = line[1:-1].split(", ", 2) if line.startswith("{") else [line]
    message = only(GOOD + "".join(f"    {key}\n" for key in keys))
    assert re.match(r"p\.yaml:1[0-2]: |p\.yaml:8: ", message)
    assert expected in message


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "is empty"),
        ("# nothing but this\n", 1, "is empty"),
        ("---\n", 1, "is empty"),
        ("null\n", 1, "is empty"),
        ("- version: 1\n", 1, "a list is not a mapping"),
        ("version\n", 1, "is not a mapping"),
        ("version: 1\nversion: 1\n", 2, "twice (first on line 1)"),
        ("version: 1\nonline:\n\t- name: a\n", 3, "tab"),
        ("version:\t1\n", 1, "tab"),
        ("version: 1\nonline: [\n", 3, "close the ["),
        ("version: 1\n  enforce: true\n", 2, "indentation"),
        ("version: 1\nprotect: [{pod: *chat}]\n", 2, "in quotes"),
        ("version: 1\nprotect: [{pod: *}]\n", 2, "in quotes"),
        ("version: 1\n---\nversion: 1\n", 2, "one document a file"),
        ("version: 1\nenforce: !!python/name:os.system x\n", 2, "tag"),
        ("version: 1\n# bell \x07\n", 2, "U+0007"),
        ('version: 1\nenforce: "tr\n', 3, "close the quotes"),
        ("version: 1\n? [a]\n: b\n", 2, "plain word"),
        ("version: 1\n1: b\n", 2, "unknown"),
        ("version: 1\nenforce: &a true\n<<: {a: 1}\n", 3, "merge keys"),
        ("version: 1\nprotect: &a [*a]\n", 2, "contains itself"),
        ("version: 1\n# a comment\u2028enforce: true\n", 2, "U+2028 ends a line"),
        ("version: 1\n# a comment\x85enforce: true\n", 2, "U+0085 ends a line"),
        ("version: 1\n# a comment\renforce: true\n", 2, "U+000D ends a line"),
        ("version: 1\nenforce: false # \u202eeurt\n", 2, "U+202E changes the order"),
    ],
)
def test_what_is_not_the_yaml_of_a_policy_is_reported_at_its_line(text: str, line: int, expected: str) -> None:
    message = mistakes(text)[0]
    assert message.startswith(f"p.yaml:{line}: "), message
    assert expected in message


def test_each_line_that_is_indented_with_a_tab_is_named() -> None:
    found = mistakes("version: 1\nonline:\n\t- name: a\n\t  match: {}\n")
    assert [message.split(":")[1] for message in found] == ["3", "4"]


def test_an_alias_bomb_ends_quickly_in_one_line() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    found = [message for message in mistakes("\n".join(rows)) if "aliases" in message]
    assert len(found) == 1


def test_endless_nesting_is_refused_without_exhausting_the_stack() -> None:
    assert "nested too deeply" in only("version: " + "[" * 50_000)


def test_more_values_than_a_policy_can_need_are_refused() -> None:
    assert "too many values" in only("version: 1\nprotect: [" + "a," * 30_000 + "]")


def test_the_same_mistake_is_not_reported_twice_for_a_misspelt_required_key() -> None:
    assert "did you mean quantile?" in only(GOOD.replace("quantile", "quantil"))


def test_what_a_message_quotes_stays_on_one_line_and_short() -> None:
    message = only(GOOD.replace("name: training", 'name: "a\\n\\e[31m' + "x" * 500 + '"'))
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 200


def test_a_missing_file_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none\.yaml:1: cannot be read \(No such file or directory\)"):
        load(tmp_path / "none.yaml")


def test_a_folder_and_a_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PolicyError, match="is not a regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(PolicyError, match="cannot be read"):
        load(tmp_path)


def test_a_file_larger_than_1_mib_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("#" * ((1 << 20) + 1))
    with pytest.raises(PolicyError, match="larger than 1 MiB"):
        load(tmp_path / "p.yaml")


def test_a_file_that_is_not_utf8_is_reported_at_the_line(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"version: 1\n# caf\xe9\n")
    with pytest.raises(PolicyError, match=r"p\.yaml:2: is not UTF-8"):
        load(tmp_path / "p.yaml")


@pytest.mark.parametrize(("mode", "writers"), [(0o664, "its group"), (0o646, "every user")])
def test_the_agent_refuses_a_policy_that_others_can_write(tmp_path: Path, mode: int, writers: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(GOOD)
    path.chmod(mode)
    assert load(path).enforce
    with pytest.raises(PolicyError, match=f"can be written by {writers}"):
        load(path, strict_permissions=True)
    path.chmod(0o644)
    assert load(path, strict_permissions=True).enforce


@pytest.mark.parametrize("text", ['"\\U00110000"', '"\\UFFFFFFFF"', '"\\U7FFFFFFF"'])
def test_a_character_that_there_is_not_is_a_mistake_at_its_line(text: str) -> None:
    only_message = only(GOOD.replace("batch", text))
    assert re.fullmatch(r"p\.yaml:9: is not YAML \(.+\); write characters themselves.+", only_message)


def test_a_version_of_yaml_that_is_beyond_counting_is_a_mistake() -> None:
    assert only(f"%YAML 1.{'9' * 5000}\n---\n{GOOD}").startswith("p.yaml:1: is not YAML (")
