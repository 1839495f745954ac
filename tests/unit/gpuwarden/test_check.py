# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden check`: one line for a right policy, every mistake of a wrong one, warnings that fail nothing."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from agent.core.model import Container, ContainerKey, ContainerUsage, EnforcementStatus, PeriodicStatus, Snapshot
from enforce.policy.findings import findings
from enforce.policy.load import check_file, parse
from gpuwarden.check import check, unresolved, with_live

ONLINE = (
    "online:\n  - {name: chat, match: {pod: a}, slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}}\n"
)
PAGE_OF = "url: 'http://a/m', metric: x"
OFFLINE = "offline:\n  - {name: t, match: {pod: b}}\n  - {name: u, match: {pod: c}}\n"


def run(tmp_path: Path, text: str, mode: int = 0o644, as_json: bool = False) -> tuple[int, list[str]]:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    path.chmod(mode)
    out = StringIO()
    code = check(path, as_json, None, out)
    return code, out.getvalue().replace(str(path), "p.yaml").splitlines()


def test_a_right_policy_is_one_line_and_exit_code_0(tmp_path: Path) -> None:
    text = "version: 1\nenforce: true\n" + ONLINE + OFFLINE
    assert run(tmp_path, text) == (0, ["p.yaml: ok: 1 online rule, 2 offline rules, enforcing"])


def test_a_policy_that_does_not_enforce_is_reported_as_such(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "version: 1\n" + OFFLINE)
    assert lines == ["p.yaml: ok: 0 online rules, 2 offline rules, deciding and logging only (enforce: false)"]


def test_a_wrong_policy_is_every_mistake_and_exit_code_2(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "version: 3\nenforce: 1\n" + ONLINE.replace("50ms", "50"))
    assert code == 2
    assert [line.split(":")[1] for line in lines if "error" in line] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("enforce: true\n" + OFFLINE, "no online rule"),
        ("enforce: true\n", "there is nothing to slow"),
        (ONLINE, "no offline rule"),
        (ONLINE.replace("50ms", "10s") + OFFLINE, "no longer than slo.target"),
        (ONLINE.replace("0.99", "0.999") + OFFLINE, "write min_samples: 1000"),
        (ONLINE.replace("0.99", "0.99999999") + OFFLINE, "is the slowest; write a lower quantile"),
        (ONLINE.replace("50ms", "1us") + OFFLINE, "cannot resolve 1us"),
        (ONLINE.replace("10s", "10s, also: {quantile: 0.5, target: 1us}") + OFFLINE, "cannot resolve 1us"),
        (
            ONLINE.replace("gpu_wait", f"prometheus, {PAGE_OF}").replace("10s", "1s") + OFFLINE,
            "scraped once a second",
        ),
        (ONLINE + OFFLINE + "protect: [{pod: a}]\n", "protect matches all that this rule matches"),
        (OFFLINE + 'protect: [{pod: "[b]"}, {pod: "?"}]\n', "protect matches all that this rule matches"),
        (ONLINE + OFFLINE.replace("pod: b", 'pod: "*"').replace("{pod: c}", "{user: x}"), "t matches all that"),
        (ONLINE.replace("{pod: a}", "{pod: a, user: x}") + OFFLINE.replace("b}", "a}"), "t matches all that"),
        (ONLINE + OFFLINE.replace("{pod: b}", "{pod: a, image: x}"), "chat matches all that"),
        (OFFLINE.replace("pod: c", "pod: c-1").replace("pod: b", 'pod: "c-*"'), "t matches all that"),
        (
            OFFLINE.replace("match: {pod: b}", "match: {pod: b}, limits: {memory: 1GiB}, ladder: [pace]"),
            "limits.memory has no effect",
        ),
    ],
)
def test_what_is_rarely_meant_is_a_warning_and_fails_nothing(tmp_path: Path, text: str, expected: str) -> None:
    code, lines = run(tmp_path, "version: 1\n" + text)
    assert code == 0
    warnings = [line for line in lines if re.match(r"p\.yaml:[0-9]+:[0-9]+: warning: .+; .+", line)]
    assert len(lines) == 1 + 3 * len(warnings)
    assert any(expected in line for line in warnings), lines


@pytest.mark.parametrize(
    "text",
    [
        ONLINE + OFFLINE.replace("{pod: b}", '{pod: "b*"}'),
        ONLINE.replace("pod: a", 'pod: "a*b"')
        + OFFLINE.replace("pod: b", 'pod: "a?"').replace("{pod: c}", "{user: y}"),
        ONLINE.replace("{pod: a}", "{user: [x, y]}") + OFFLINE.replace("{pod: b}", "{user: [x, y, z]}"),
        ONLINE.replace("{pod: a}", "{labels: {app: a}}") + OFFLINE.replace("{pod: b}", "{labels: {job: b}}"),
    ],
)
def test_what_may_never_meet_is_no_overlap(tmp_path: Path, text: str) -> None:
    assert len(run(tmp_path, "version: 1\n" + text)[1]) == 1


def test_two_promises_of_which_the_wider_comes_first_are_an_overlap_and_the_other_order_is_none(tmp_path: Path) -> None:
    wide, narrow = (ONLINE.splitlines()[1].replace("a}", match) for match in ('"a*"}', "ab}"))
    narrow = narrow.replace("chat", "other")
    assert "move this one before it" in "".join(run(tmp_path, f"version: 1\nonline:\n{wide}\n{narrow}\n{OFFLINE}")[1])
    assert len(run(tmp_path, f"version: 1\nonline:\n{narrow}\n{wide}\n{OFFLINE}")[1]) == 1


def test_a_policy_that_others_can_write_is_a_warning_that_the_agent_will_refuse_it(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "version: 1\n" + ONLINE, mode=0o666)
    assert code == 0
    assert "the agent will refuse this file" in lines[1]


def test_write_access_is_reported_of_the_file_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\n" + ONLINE + OFFLINE)
    path.chmod(0o666)
    checked = check_file(path)
    path.unlink()
    assert ["the agent will refuse this file" in finding.text for finding in findings(checked)] == [True]


@pytest.mark.parametrize("text", ["version: 1\n", "version: 2\n"])
def test_a_files_name_may_be_any_bytes_and_steers_no_terminal(tmp_path: Path, text: str) -> None:
    path = tmp_path / os.fsdecode(b"p\xff\x1b[31m.yaml")
    path.write_text(text)
    out = TextIOWrapper(BytesIO(), encoding="utf-8", write_through=True)
    check(path, False, None, out)
    output = out.buffer.getvalue().decode() if isinstance(out.buffer, BytesIO) else ""
    assert output.startswith(f"{tmp_path}/p\\xff\\x1b[31m.yaml:")
    assert "\x1b" not in output


def test_a_mistake_shows_its_line_with_carets_under_the_place_and_what_to_write(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "version: 1\n" + ONLINE.replace("50ms", "50"))
    line = ONLINE.splitlines()[1].replace("50ms", "50")
    assert lines[0].startswith(f"p.yaml:3:{line.index('50,') + 1}: error: online[0].slo.target: 50 is a duration")
    assert lines[0].endswith("such as 50ms")
    assert lines[1] == f"    3 | {line}"
    assert lines[2] == "      | " + " " * line.index("50,") + "^^"


def test_an_unknown_key_is_marked_itself_and_a_wrong_value_itself(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "version: 1\nenfroce: maybe\ntuning:\n  gate_hold: 20\n")
    assert [line[8:] for line in lines if "^" in line] == ["^^^^^^^", "             ^^"]


def test_carets_stand_where_wide_and_escaped_characters_leave_them(tmp_path: Path) -> None:
    _, lines = run(tmp_path, 'version: 1\nprotect: [{pod: "名前\u200b"}, {pdo: x}]\n')
    assert lines[1] == '    2 | protect: [{pod: "名前\\u200b"}, {pdo: x}]'
    assert lines[2] == "      | " + " " * (len('protect: [{pod: "') + 4 + 6 + len('"}, {')) + "^^^"


def test_of_an_endless_line_only_what_is_round_the_place_is_shown(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "version: 1\nprotect: [" + "{pod: a}, " * 50 + "{pdo: b}, " + "{pod: c}, " * 50 + "]\n")
    assert lines[1].startswith("    2 | …")
    assert lines[1].endswith("…")
    assert len(lines[1]) < 130
    assert lines[1][lines[2].index("^") : lines[2].rindex("^") + 1] == "pdo"


def test_a_key_in_the_wrong_section_is_reported_with_the_right_one(tmp_path: Path) -> None:
    text = OFFLINE.replace("{name: t,", "{name: t, floor: 3%,")
    _, lines = run(tmp_path, "version: 1\n" + text)
    assert "offline[0].floor: unknown key; write it below limits" in lines[0]


def test_a_file_that_cannot_be_read_is_a_mistake_without_an_excerpt(tmp_path: Path) -> None:
    out = StringIO()
    assert check(tmp_path / "none.yaml", False, None, out) == 2
    assert out.getvalue().count("\n") == 1


def test_json_tells_programs_the_same(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "version: 1\nenfroce: true\n", as_json=True)
    report = json.loads("\n".join(lines))
    assert (code, report["ok"], report["summary"]) == (2, False, None)
    [one] = report["findings"]
    assert (one["severity"], one["line"], one["column"], one["width"]) == ("error", 2, 1, 7)
    assert one["excerpt"] == "enfroce: true"
    assert "did you mean enforce?" in one["text"]
    code, lines = run(tmp_path, "version: 1\n" + ONLINE, as_json=True)
    report = json.loads("\n".join(lines))
    assert (code, report["ok"]) == (0, True)
    assert [(one["severity"], one["line"]) for one in report["findings"]] == [("warning", 2)]


def test_there_is_colour_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    path = tmp_path / "p.yaml"
    path.write_text("version: 2\n")
    out = Terminal()
    check(path, False, None, out)
    assert "\x1b[" in out.getvalue()
    assert not any("\x1b" in line for line in run(tmp_path, "version: 2\n")[1])
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    check(path, False, None, out)
    assert "\x1b[31" not in out.getvalue()


def live(*containers: Container) -> Snapshot:
    return Snapshot(1, 1, 1, containers=tuple(ContainerUsage(it, (), ()) for it in containers))


def pod(name: str, namespace: str = "serving") -> Container:
    return Container(ContainerKey(name), name, "containerd", pod=name, namespace=namespace)


def against(tmp_path: Path, text: str, snapshot: Snapshot) -> list[str]:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\n" + text)
    return [finding.text for finding in with_live(check_file(path), snapshot)]


def test_live_names_the_rules_that_nothing_fits_that_runs_now(tmp_path: Path) -> None:
    found = against(tmp_path, ONLINE + OFFLINE, live(pod("a"), pod("b")))
    assert [text.partition(";")[0] for text in found] == ["u: matches none of the 2 containers with a GPU now"]


PERIODIC = "periodic:\n  - {name: camera, match: {pod: a}, period: 500ms}\n"


def test_a_request_that_is_let_through_before_its_deadline_is_a_warning(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "version: 1\nenforce: true\n" + PERIODIC)
    assert lines[0] == "p.yaml: ok: 0 online rules, 0 offline rules, 1 periodic rule, enforcing"
    assert "after max_pause, 200ms, a request waits for no turn" in lines[1]
    assert "write max_pause: 500ms" in lines[1]


@pytest.mark.parametrize(("load", "count"), [(None, 0), (0.99, 0), (1.25, 1)])
def test_live_names_periodic_rules_whose_deadlines_cannot_all_be_met(
    tmp_path: Path, load: float | None, count: int
) -> None:
    status = EnforcementStatus("periodic", "camera", periodic=PeriodicStatus(0.5, 0.5, load_ratio=load))
    snapshot = replace(live(pod("a")), enforcement={ContainerKey("a"): status})
    found = against(tmp_path, PERIODIC.replace("500ms", "40ms"), snapshot)
    assert len([text for text in found if "deadlines may be missed" in text and "1.25" in text]) == count


def test_live_names_the_containers_that_two_rules_claim(tmp_path: Path) -> None:
    text = ONLINE.replace("pod: a", 'pod: "a-*"') + OFFLINE.replace("pod: b", 'pod: "*-0"').replace("c}", "a-1}")
    found = against(tmp_path, text, live(pod("a-0"), pod("a-1"), pod("b-0")))
    assert sum("a-0 is matched by chat and t, and left alone" in text for text in found) == 1


PAGE = "\n".join(f'x_bucket{{le="{le}"}} {n}' for n, le in enumerate(("0.01", "0.1", "1", "+Inf"))) + "\n"


@pytest.mark.parametrize(
    ("target", "page", "expected"),
    [
        ("100ms", PAGE, None),
        ("50ms", PAGE, "next buckets end at 10ms or 100ms"),
        ("5ms", PAGE, "next buckets end at 10ms"),
        ("2s", PAGE, "last finite bucket ends at 1s"),
        ("50ms", "y 1\n", "no histogram x"),
        ("100ms", PAGE + 'x_bucket{le="1e305"} 3\n', None),
        ("2s", PAGE + 'x_bucket{le="1e305"} 3\n', "last finite bucket ends at 1s"),
    ],
)
def test_live_reports_what_the_page_of_metrics_lacks(target: str, page: str, expected: str | None) -> None:
    text = ONLINE.replace("gpu_wait", f"prometheus, {PAGE_OF}").replace("50ms", target)
    found = list(unresolved(parse("version: 1\n" + text, "p"), lambda url: page))
    assert (expected is None and not found) or (expected is not None and expected in found[0].text)


@pytest.mark.parametrize(("page", "at"), [(PAGE, ["also", "target"]), ("y 1\n", ["slo", "metric"])])
def test_live_reports_each_quantile_whose_target_the_page_cannot_show(page: str, at: list[str]) -> None:
    slo = ONLINE.replace("gpu_wait", f"prometheus, {PAGE_OF}").replace("50ms", "100ms")
    text = slo.replace("window: 10s", "window: 10s, also: {quantile: 0.5, target: 50ms}")
    (found,) = unresolved(parse("version: 1\n" + text, "p"), lambda url: page)
    assert list(found.path[-2:]) == at
