# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden check`: one line for a right policy, every mistake of a wrong one, warnings that fail nothing."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from enforce.check import check

ONLINE = (
    "online:\n  - {name: chat, match: {pod: a}, slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}}\n"
)
OFFLINE = "offline:\n  - {name: t, match: {pod: b}}\n  - {name: u, match: {pod: c}}\n"


def run(tmp_path: Path, text: str, mode: int = 0o644) -> tuple[int, list[str]]:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    path.chmod(mode)
    out = StringIO()
    code = check(path, out)
    return code, out.getvalue().replace(str(path), "p.yaml").splitlines()


def test_a_right_policy_is_one_line_and_exit_code_0(tmp_path: Path) -> None:
    text = "version: 1\nenforce: true\n" + ONLINE + OFFLINE
    assert run(tmp_path, text) == (0, ["p.yaml: ok: 1 online rule, 2 offline rules, enforcing"])


def test_a_policy_that_does_not_enforce_says_so(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "version: 1\n" + ONLINE)
    assert lines == ["p.yaml: ok: 1 online rule, 0 offline rules, deciding and logging only (enforce: false)"]


def test_a_wrong_policy_is_every_mistake_and_exit_code_2(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "version: 3\nenforce: 1\n" + ONLINE.replace("50ms", "50"))
    assert code == 2
    assert [line.split(":")[1] for line in lines] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("enforce: true\n" + OFFLINE, "no online rule"),
        ("enforce: true\n" + ONLINE, "no offline rule"),
        (ONLINE.replace("50ms", "10s"), "no longer than slo.target"),
        (ONLINE.replace("0.99", "0.999"), "is the slowest"),
        (ONLINE + "protect: [{pod: a}]\n", "never applies"),
        (OFFLINE + "protect: [{pod: b}]\n", "never applies"),
        (
            OFFLINE.replace("match: {pod: b}", "match: {pod: b}, limits: {memory: 1GiB}, ladder: [pace]"),
            "limits.memory has no effect",
        ),
    ],
)
def test_what_is_rarely_meant_is_a_warning_and_fails_nothing(tmp_path: Path, text: str, says: str) -> None:
    code, lines = run(tmp_path, "version: 1\n" + text)
    assert code == 0
    assert len(lines) == 2
    assert lines[1].startswith("p.yaml: warning: ")
    assert says in lines[1]


def test_a_policy_that_others_can_write_is_a_warning_that_the_agent_will_refuse_it(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "version: 1\n" + ONLINE, mode=0o666)
    assert code == 0
    assert "the agent will refuse this file" in lines[1]
