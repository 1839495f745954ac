# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden policy init`: what is proposed for what runs, what is asked, and that the result is always right."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.errors import PolicyError, SetupError
from agent.core.model import (
    HOST,
    Container,
    ContainerKey,
    ContainerUsage,
    DeviceUuid,
    Process,
    ProcessId,
    ProcessUsage,
    Snapshot,
    Usage,
)
from enforce.policy.load import check_file, check_text, load
from enforce.policy.model import ContainerFacts, HttpSource
from gpuwarden.check import with_live
from gpuwarden.policy_init.command import Environment, add_arguments, init
from gpuwarden.policy_init.draft import Draft, left_alone, text
from gpuwarden.policy_init.proposal import match_of, proposals

ONE = Usage(DeviceUuid("GPU-1"), 0.31, None, 12 << 30, None, None, None)


def pod(name: str, namespace: str = "x", image: str = "i", **labels: str) -> Container:
    labels = {key.replace("_", "-"): value for key, value in labels.items()}
    key = ContainerKey(f"{namespace}/{name}")
    return Container(key, "main", "containerd", "", name, namespace, image, labels)


def docker(name: str, image: str = "i") -> Container:
    return Container(ContainerKey(name), name, "docker", "c" * 64, image=image)


def running(*containers: Container, command: str = "python") -> Snapshot:
    ids = [ProcessId(number, 1) for number, _ in enumerate(containers)]
    return Snapshot(
        1,
        1,
        1,
        containers=tuple(ContainerUsage(it, (ONE,), (me,)) for me, it in zip(ids, containers, strict=True)),
        processes=tuple(
            ProcessUsage(Process(me, command, "root", it.key), ()) for me, it in zip(ids, containers, strict=True)
        ),
    )


def run(file: str | Path, *flags: str, live: Snapshot | None = None, answers: Iterable[str] | None = None) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["init", *flags, str(file)])
    out = StringIO()
    typed = iter(answers or ())

    def ask(question: str) -> str:
        out.write(f"{question}\n")
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    def now() -> Snapshot:
        assert live is not None
        return live

    assert init(options, Environment(None if answers is None else ask, out, now, lambda: live)) in (0, 2)
    return out.getvalue()


@pytest.mark.parametrize(
    ("container", "role", "match"),
    [
        (pod("chat-7d4b9c6f5-x2x8k", "serving"), "online", {"namespace": "serving", "pod": "chat-*"}),
        (pod("llm-0", image="vllm/vllm-openai:v0.8"), "online", {"namespace": "x", "pod": "llm-*"}),
        (pod("resnet-9bxzk", job_name="resnet"), "offline", {"namespace": "x", "pod": "resnet-*"}),
        (docker("app-train-1"), "offline", {"container": "app-train-*"}),
        (docker("app_web_2"), None, {"container": "app_web_*"}),
        (docker("serve-batch"), None, {"container": "serve-batch"}),
        (Container(ContainerKey("u"), "nightly-training.service", "systemd"), "offline", None),
        (Container(ContainerKey("u"), "session-3.scope", "systemd"), None, None),
        (Container(HOST, "host", "host"), None, None),
        (Container(ContainerKey("d"), "c" * 12, "docker", "c" * 64), None, None),
    ],
)
def test_a_container_is_guessed_by_its_words_and_named_by_what_outlives_it(
    container: Container, role: str | None, match: dict[str, str] | None
) -> None:
    [one] = proposals(running(container))
    assert one.role == role
    if match is not None:
        assert one.match == match


def test_what_a_user_started_is_not_named_as_if_it_were_the_systems() -> None:
    cgroup = "/user.slice/user-1000.slice/user@1000.service/app.slice/nightly-training.service"
    [one] = proposals(running(Container(ContainerKey("u"), "nightly-training.service", "systemd", cgroup=cgroup)))
    assert (one.match, one.why) == (None, "a login session")


def test_replicas_are_one_proposal_and_online_ones_come_first() -> None:
    found = proposals(running(docker("train-1"), pod("chat-0"), pod("chat-1"), docker("x")))
    assert [(one.role, len(one.uses)) for one in found] == [("online", 2), ("offline", 1), (None, 1)]


def test_without_a_terminal_the_proposals_are_written_and_check_accepts_them(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "policy.yaml"
    out = run(path, live=running(pod("chat-0", "serving"), docker("train-1"), Container(HOST, "host", "host")))
    policy = load(path, strict_permissions=True)
    assert not policy.enforce
    assert ([rule.name for rule in policy.online], [rule.name for rule in policy.offline]) == (["chat"], ["train"])
    assert policy.online[0].slo.target_ns == 50_000_000
    written = path.read_text()
    assert '# now: serving/chat-0: main, 31% of a GPU\'s SM time, 12.0 GiB ("serving" in its namespace)' in written
    assert "#   host, 31%" in written
    assert f"gpuwarden check --live {path}" in written
    assert "ok: 1 online rule, 1 offline rule, deciding and logging only" in out
    assert not with_live(check_file(path), running(pod("chat-0", "serving"), docker("train-1")))


def test_a_server_that_counts_its_own_latencies_is_pointed_out(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    run(path, live=running(pod("llm-0", image="vllm/vllm-openai:v0.8")))
    assert "  # vLLM exports its own latencies: docs/examples/vllm.yaml\n" in path.read_text()


def test_a_policy_that_is_there_is_never_written_over_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("mine\n")
    with pytest.raises(SetupError, match="exists: give another FILE"):
        run(path, "--online", "chat")
    assert path.read_text() == "mine\n"
    run(path, "--online", "chat", "--force")
    assert load(path).online
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SetupError, match="exists: give another FILE"):
        run(tmp_path / "link", "--online", "chat")


def test_flags_say_it_all(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    flags = ["--online", "serving/chat-*", "--slo", "20ms", "--signal", "http", "--port", "8000"]
    run(path, *flags, "--offline", "namespace=batch,labels.app=a b,pod=x-*,pod=y-*", "--offline", "train-*")
    policy = load(path)
    [chat] = policy.online
    assert (chat.name, chat.match.namespace, chat.match.pod) == ("chat", ("serving",), ("chat-*",))
    assert (chat.slo.target_ns, chat.slo.signal) == (20_000_000, "http")
    first, second = policy.offline
    assert (first.match.pod, first.match.labels) == (("x-*", "y-*"), (("app", ("a b",)),))
    assert second.match.container == ("train-*",)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--online", "chat", "--slo", "50"], "is a duration without a unit"),
        (["--online", "chat", "--signal", "htpp"], "did you mean http?"),
        (["--online", "chat", "--signal", "http"], "has no port; write port: 8000"),
        (["--online", "chat", "--offline", "chat"], "matches the same as"),
        (["--online", "chat", "--slo", "1ms}, enforce: {a"], "is not a duration"),
    ],
)
def test_flags_that_make_no_valid_policy_are_reported_as_check_reports_it(
    tmp_path: Path, flags: list[str], expected: str
) -> None:
    assert expected in run(tmp_path / "p.yaml", *flags)
    assert not (tmp_path / "p.yaml").exists()


def test_an_invalid_match_is_reported_with_the_right_form(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"KEY being one of namespace, pod"):
        run(tmp_path / "p.yaml", "--online", "nmespace=x")


def test_on_a_terminal_each_is_asked_about_and_nonsense_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    live = running(pod("chat-0", "serving"), docker("train-1"), docker("x"))
    out = run(path, live=live, answers=["", "5", "20ms", "http", "", "8000", "off", "o", "l"])
    assert "5 is a duration without a unit" in out
    policy = load(path)
    [chat] = policy.online
    assert (chat.slo.target_ns, chat.slo.signal) == (20_000_000, "http")
    assert [rule.name for rule in policy.offline] == ["train"]


def test_what_another_signal_than_the_chosen_one_has_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    flags = ["--signal", "http", "--port", "8000", "--path", "/v1", "--quantile", "0.9"]
    live = running(pod("chat-0", "serving"), pod("embed-0", "serving"))
    run(path, *flags, live=live, answers=["", "", "gpu_wait", "", "", "", ""])
    chat, embed = (rule.slo for rule in load(path).online)
    assert (chat.signal, chat.source, chat.quantile) == ("gpu_wait", None, 0.9)
    assert embed.source == HttpSource(8000, "/v1")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--quantile", "99"], "--quantile: 99 "),
        (["--slo", "50"], "--slo: 50 is a duration without a unit"),
        (["--port", "no"], "--port: 'no' "),
        (["--signal", "http", "--unit", "h"], "--unit: 'h' is unknown"),
    ],
)
def test_a_wrong_flag_is_reported_before_anything_is_asked(tmp_path: Path, flags: list[str], expected: str) -> None:
    with pytest.raises(PolicyError, match=expected):
        run(tmp_path / "p.yaml", *flags, live=running(docker("x")), answers=[])


def test_a_container_that_another_rules_pattern_fits_is_not_reported_as_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    live = running(docker("train-1"), docker("train-node"), docker("x"))
    out = run(path, live=live, answers=["offline", "leave", "leave"])
    listed = path.read_text().partition("# Left alone")[2]
    assert "x, 31%" in listed
    assert "train-node" not in listed
    assert "warning: train-node was to be left alone, but train makes it offline; make the match narrower" in out
    assert out.count("warning: train-node") == 1


def test_a_container_that_two_rules_match_is_reported_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    live = running(docker("train-1"), docker("train-node"))
    out = run(path, live=live, answers=["offline", "online", "", ""])
    listed = path.read_text().partition("# Left alone")[2]
    assert "(matched by train-node and train: left alone)" in listed
    assert "train-1" not in listed
    assert "warning: train-node is matched by train-node and train, and left alone" in out


def test_a_wide_flag_warns_of_no_container_that_was_to_be_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    live = running(pod("a-0"), pod("b-0"), pod("c-0", "y"), Container(HOST, "host", "host"))
    out = run(path, "--online", "x/*", "--offline", "namespace=x,pod=b-*", "--slo", "20ms", live=live)
    listed = path.read_text().partition("# Left alone")[2]
    assert [name for name in ("x/a-0", "x/b-0", "y/c-0", "host") if name in listed] == ["x/b-0", "y/c-0", "host"]
    assert "matched by rule and b, and left alone" in out
    assert "was to be left alone" not in out


def test_a_closed_input_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="nothing was written"):
        run(tmp_path / "p.yaml", live=running(docker("x")), answers=[])
    assert not [*tmp_path.iterdir()]


def test_a_dash_prints_it() -> None:
    assert check_text(run("-", "--online", "chat"), "p").value


def test_a_name_that_makes_no_pattern_is_left_alone_and_the_rest_is_written(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    hostile = docker("train" + "[" * 100)
    assert match_of(hostile) is None
    run(path, live=running(docker("train-1"), hostile, Container(HOST, "host", "host")))
    assert [rule.name for rule in load(path).offline] == ["train"]
    listed = " ".join(path.read_text().partition("# Left alone")[2].replace("#", " ").split())
    assert "[[, 31% of a GPU's SM time, 12.0 GiB (its name is too long for a pattern)" in listed
    assert "host, 31%" in listed


NAMES = st.text(min_size=1, max_size=12) | st.text(st.sampled_from("[*?a-1"), min_size=64, max_size=128)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.builds(pod, NAMES, NAMES) | st.builds(docker, NAMES), max_size=4), NAMES)
def test_whatever_runs_the_result_is_right_and_each_rule_fits_whom_it_was_made_for(
    containers: list[Container], command: str
) -> None:
    found = proposals(running(*containers, command=command))
    drafts = [Draft(one.name, one.match) for one in found if one.match is not None]
    policy = check_text(text([], drafts, command) + left_alone(one.why for one in found), "p").accepted()
    assert len(policy.offline) == len(drafts)
    for container in containers:
        if match_of(container) is not None:
            assert any(rule.match.fits(ContainerFacts(container), every_process=True) for rule in policy.offline)


def test_a_files_name_steers_no_terminal(tmp_path: Path) -> None:
    out = run(tmp_path / "a\x1b[31m.yaml", "--offline", "batch/*")
    assert "\x1b" not in out
    assert "written to " in out
