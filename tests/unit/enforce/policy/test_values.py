# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a right policy becomes: base units, defaults, and nothing lost."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.errors import PolicyError
from enforce.policy import model, quantities, schema
from enforce.policy.load import parse
from enforce.policy.model import HttpSource, Limits, Match, OfflineRule, PrometheusSource, Slo, Tuning, UprobeSource

DESIGN = """\
version: 1
enforce: true                     # false: decide and log only
online:
  - name: chat
    match: {namespace: serving, pod: "chat-*"}        # also container, image, labels, unit, cgroup, user, command
    slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
offline:
  - name: training
    match: {namespace: batch}
    law: headroom
    limits: {memory: 40GiB, floor: 5%, max_pause: 200ms}
    ladder: [pace, freeze, evict]
protect: [{unit: "ssh.service"}]  # never touched
"""


def test_the_policy_of_the_design_is_read_in_base_units() -> None:
    policy = parse(DESIGN, "p")
    slo = policy.online[0].slo
    assert policy.enforce
    assert slo == Slo("gpu_wait", 0.99, target_ns=50_000_000, window_ns=10**10, min_samples=20)
    assert policy.online[0].match == Match(namespace=("serving",), pod=("chat-*",))
    assert policy.offline[0].limits == Limits(40 * 2**30, 0.05, 200_000_000, None)
    assert policy.offline[0].ladder == ("pace", "freeze", "evict")
    assert policy.protect == (Match(unit=("ssh.service",)),)


def test_a_second_quantile_is_of_the_same_latency() -> None:
    text = DESIGN.replace("window: 10s", "window: 10s, also: {quantile: 50%, target: 8ms}")
    slo, without = (parse(one, "p").online[0].slo for one in (text, DESIGN))
    assert slo == replace(without, also=replace(without, quantile=0.5, target_ns=8_000_000))


LADDER = ("gate", "pace", "deny", "hold")


def test_defaults_are_those_of_the_reference() -> None:
    policy = parse("version: 1\noffline:\n  - {name: t, match: {pod: x}}\n", "p")
    limits = Limits(memory_bytes=None, floor_ratio=0.05, max_pause_ns=200_000_000, max_queued_ns=None)
    assert policy.offline == (OfflineRule("t", Match(pod=("x",)), "headroom", None, 1.0, limits, LADDER),)
    assert policy.tuning == Tuning(100_000_000, 20_000_000, 200_000, 2_000_000_000, 5_000_000_000)
    assert not policy.enforce


def test_a_policy_of_a_version_alone_is_valid_and_matches_no_container() -> None:
    policy = parse("version: 1\n", "p")
    assert (policy.enforce, policy.online, policy.offline, policy.protect) == (False, (), (), ())


def test_words_that_yaml_1_1_takes_for_booleans_stay_text() -> None:
    policy = parse("version: 1\nprotect: [{namespace: no, pod: [on, y, 2001-01-01]}]\n", "p")
    assert policy.protect == (Match(namespace=("no",), pod=("on", "y", "2001-01-01")),)


def test_an_alias_may_repeat_a_match() -> None:
    text = "version: 1\nprotect:\n  - &a {labels: {app: [x, y]}}\n  - *a\n"
    assert parse(text, "p").protect == (Match(labels=(("app", ("x", "y")),)),) * 2


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake() -> None:
    assert parse("version: 1\r\nenforce: true\r\n", "p").enforce


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [
        ("1ns", 1),
        ("200us", 200_000),
        ("200µs", 200_000),
        ("50ms", 50_000_000),
        ("1.5s", 1_500_000_000),
        ("1m", 60 * 10**9),
        ("1h", 3600 * 10**9),
        ("0.1s", 100_000_000),
        ("10 s", 10 * 10**9),
    ],
)
def test_durations_are_exact(text: str, duration_ns: int) -> None:
    assert quantities.parse_duration_ns(text) == duration_ns


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("40GiB", 40 << 30), ("512MiB", 512 << 20), ("10GB", 10**10), ("1TiB", 1 << 40)]
)
def test_sizes_are_exact(text: str, size_bytes: int) -> None:
    assert quantities.parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "ms", "5", "5 5ms", "5ms ", "٥ms", "1e3ms", "0x5ms", "0.5ns", "5d", "--5ms", "5\nms", "1,5s"]
)
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(quantities.UnitError):
        quantities.parse_duration_ns(text)


@pytest.mark.parametrize(
    ("value", "ratio"), [("5%", 0.05), (0.05, 0.05), (1, 1.0), (0, 0.0), ("100%", 1.0), ("12.5%", 0.125)]
)
def test_ratios_are_percentages_or_numbers(value: object, ratio: float) -> None:
    assert quantities.parse_ratio(value) == pytest.approx(ratio, abs=1e-15)


@given(st.integers(min_value=0, max_value=10**15))
def test_a_duration_and_a_size_survive_being_written_and_read(number: int) -> None:
    assert quantities.parse_duration_ns(quantities.format_duration(number)) == number
    assert quantities.parse_size_bytes(quantities.format_size(number)) == number


@given(st.one_of(st.text(), st.floats(), st.integers(), st.booleans(), st.none(), st.lists(st.integers())))
def test_a_quantity_is_read_or_refused_and_never_crashes(value: object) -> None:
    for parse_value in (quantities.parse_duration_ns, quantities.parse_size_bytes, quantities.parse_ratio):
        with contextlib.suppress(quantities.UnitError):
            assert math.isfinite(parse_value(value))


def mistakes(text: str) -> list[str]:
    try:
        parse(text, "p")
    except PolicyError as error:
        return error.problems
    return []


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.sampled_from(["version", "online", "offline", "match", "slo", "name", "limits", "ladder", "labels", "x"])
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@given(st.text(alphabet=list("version: 1\nonline[]{}&*a,-\"'#|>!?%\t~"), max_size=40))
def test_any_text_is_a_policy_or_a_list_of_mistakes(text: str) -> None:
    assert all(problem.startswith("p:") and "; " in problem for problem in mistakes(text))


@settings(max_examples=50)
@given(TREES)
def test_any_yaml_is_a_policy_or_a_list_of_mistakes(tree: object) -> None:
    assert all(problem.startswith("p:") and "; " in problem for problem in mistakes(yaml.safe_dump(tree)))


def slo_of(text: str) -> Slo:
    keys = f"{{quantile: 0.99, target: 50ms, window: 10s, {text}}}"
    return parse(f"version: 1\nonline: [{{name: o, match: {{pod: x}}, slo: {keys}}}]\n", "p").online[0].slo


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("signal: gpu_wait", None),
        ("signal: http, port: 8000", HttpSource(8000)),
        ("signal: http, port: 80, path: /v1/", HttpSource(80, "/v1/")),
        ("signal: http, port: 80, status: '5xx, 2xx'", HttpSource(80, None, (2, 5))),
        (
            "signal: prometheus, url: 'http://10.0.0.7:8000/metrics', metric: 'vllm:e2e_request_latency_seconds'",
            PrometheusSource("http://10.0.0.7:8000/metrics", "vllm:e2e_request_latency_seconds"),
        ),
        (
            "signal: prometheus, url: 'https://[::1]/m', metric: m, unit: ms, labels: {model: [b, a], app: 'x*'}",
            PrometheusSource("https://[::1]/m", "m", (("app", ("x*",)), ("model", ("b", "a"))), 1_000_000),
        ),
        ("signal: uprobe, binary: /bin/server, symbol: serve", UprobeSource("/bin/server", symbol="serve")),
        ("signal: uprobe, binary: /bin/server, offset: 0x1A", UprobeSource("/bin/server", offset=26)),
        ("signal: uprobe, binary: /b, offset: 26, nothrow: true", UprobeSource("/b", offset=26, nothrow=True)),
    ],
)
def test_what_a_signal_needs_beyond_its_name_is_kept(text: str, source: object) -> None:
    assert slo_of(text).source == source


def test_every_key_of_a_signal_exists_and_belongs_to_that_signal_alone() -> None:
    keys = [key for signal in model.SIGNALS for key in model.SIGNAL_KEYS[signal]]
    assert len(keys) == len(set(keys))
    assert set(keys) < schema.SloSection.model_fields.keys()
    assert all(set(model.NEEDED_KEYS[one]) <= set(model.SIGNAL_KEYS[one]) for one in model.SIGNALS)
