# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The JSON Schema for editors agrees with `gpuwarden check`, as far as it can say a thing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from agent.config.yaml_source import read
from agent.core.errors import PolicyError
from enforce.policy import model
from enforce.policy.load import parse
from enforce.policy.schema import json_schema, json_schema_page

ROOT = Path(__file__).parents[4]
SCHEMA = Draft7Validator(json_schema())

DURATIONS = st.builds("{}{}".format, st.integers(1, 900), st.sampled_from(["ms"]))
SIZES = st.builds("{}{}".format, st.integers(2, 900), st.sampled_from(["GiB", " MiB", "GB", "MB"]))
INSIDE = st.builds("{}%".format, st.integers(1, 99)) | st.floats(0.001, 0.999)
PATTERN = st.text("abc-*?.", min_size=1, max_size=6)
PATTERNS = PATTERN | st.lists(PATTERN, min_size=1, max_size=3)
LABELS = st.dictionaries(st.text("ab/.", min_size=1, max_size=5), PATTERNS, min_size=1, max_size=2)
OF_SIGNAL: dict[str, Any] = {
    "gpu_wait": st.just({}),
    "http": st.fixed_dictionaries({"port": st.integers(1, 65535)}, optional={"path": st.just("/v1/")}),
    "prometheus": st.fixed_dictionaries(
        {"url": st.just("http://a:1/metrics"), "metric": st.just("vllm:x_seconds")},
        optional={"labels": LABELS, "unit": st.sampled_from(sorted(model.UNITS_NS))},
    ),
    "uprobe": st.fixed_dictionaries(
        {"binary": st.just("/b"), "symbol": st.just("f")}, optional={"nothrow": st.booleans()}
    )
    | st.just({"binary": "/usr/bin/x", "offset": "0x1a40"}),
}
MATCH = st.dictionaries(
    st.sampled_from(["namespace", "container", "image", "unit", "cgroup", "user", "command"]), PATTERNS, max_size=3
)
LIMITS = st.fixed_dictionaries(
    {},
    optional={"memory": SIZES, "floor": st.just("0%"), "max_pause": DURATIONS, "max_queued": DURATIONS},
)
HEALTH = st.fixed_dictionaries({}, optional={"devices": PATTERNS, "patience": DURATIONS})


@st.composite
def slos(draw: st.DrawFn) -> dict[str, Any]:
    """A promise, with what its signal needs."""
    signal = draw(st.sampled_from(model.SIGNALS))
    common = {"signal": signal, "quantile": draw(INSIDE), "target": draw(DURATIONS), "window": "10s"}
    second = {"target": "10m", "also": {"quantile": "0.01%", "target": draw(DURATIONS)}}  # below whatever is drawn
    also = draw(st.sampled_from([{}, second]))
    return {**common, **draw(OF_SIGNAL[signal]), **draw(st.sampled_from([{}, {"min_samples": 50}])), **also}


@st.composite
def offline(draw: st.DrawFn) -> dict[str, Any]:
    """An offline rule without its name and match."""
    law = draw(st.sampled_from(model.LAWS))
    rungs = st.lists(st.sampled_from(model.RUNGS), min_size=1, max_size=3)
    optional = draw(st.fixed_dictionaries({}, optional={"limits": LIMITS, "ladder": rungs, "weight": st.just(2.5)}))
    return {"law": law, **({"share": draw(INSIDE)} if law == "fixed" else {}), **_floor(law, optional)}


def _floor(law: str, rule: dict[str, Any]) -> dict[str, Any]:
    """A fixed share must not be below the floor."""
    return {**rule, "limits": {**rule.get("limits", {}), "floor": 0}} if law == "fixed" else rule


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """A right policy: no two rules have one name or one match."""
    promised = [{"slo": slo} for slo in draw(st.lists(slos(), max_size=3))]
    slowed = draw(st.lists(offline(), max_size=3))
    named = [
        {"name": f"r{number}", "match": {**draw(MATCH), "pod": f"r{number}-*"}, **rule}
        for number, rule in enumerate([*promised, *slowed])
    ]
    optional: dict[str, Any] = {
        "enforce": st.booleans(),
        "protect": st.lists(MATCH.filter(bool), max_size=2),
        "tuning": st.fixed_dictionaries({}, optional={"gate_hold": DURATIONS}),
        "annotations": st.fixed_dictionaries({}, optional={"online": PATTERNS, "offline": PATTERNS}),
        "health": st.lists(
            st.fixed_dictionaries({}, optional={"devices": PATTERNS, "patience": DURATIONS}), max_size=2
        ),
    }
    rest = draw(st.fixed_dictionaries({}, optional=optional))
    return {"version": 1, "online": named[: len(promised)], "offline": named[len(promised) :], **rest}


def accepted(text: str) -> bool:
    try:
        parse(text, "p")
    except PolicyError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(policies())
def test_a_right_policy_is_right_to_both(policy: dict[str, Any]) -> None:
    parse(yaml.safe_dump(policy), "p")
    SCHEMA.validate(policy)


@settings(max_examples=150, deadline=None)
@given(policies(), st.data())
def test_whatever_check_accepts_the_schema_accepts(policy: dict[str, Any], data: st.DataObject) -> None:
    odd = st.sampled_from(["", "x", "5%", "40GiB", "10s", 0, 1, 0.5, True, None, [], {}, ["a"], {"a": "b"}])
    section: Any = policy
    while True:
        key = data.draw(st.sampled_from([*section] if isinstance(section, dict) else range(len(section))))
        if not section[key] or not isinstance(section[key], (dict, list)) or data.draw(st.booleans()):
            break
        section = section[key]
    section[key] = data.draw(odd)
    text = yaml.safe_dump(policy)
    assert SCHEMA.is_valid(read(text).data) or not accepted(text)


RULE = "version: 1\noffline: [{name: t, match: {pod: a}%s}]\n"
SLO = "version: 1\nonline: [{name: t, match: {pod: a}, slo: {quantile: 0.9, target: 50ms, window: 10s%s}}]\n"


@pytest.mark.parametrize(
    "text",
    [
        "version: 2\n",
        "enforce: true\n",
        "version: 1\nenforce: yes\n",
        "version: 1\nenforce:\n",
        "version: 1\nenfroce: true\n",
        "version: 1\nonline: {name: t}\n",
        "version: 1\nprotect: [{}]\n",
        "version: 1\nprotect: [{pod: []}]\n",
        "version: 1\nprotect: [{pod: 7}]\n",
        "version: 1\nprotect: [{labels: {}}]\n",
        "version: 1\nprotect: [{labels: {a: 1}}]\n",
        "version: 1\noffline: [{name: t}]\n",
        RULE.replace("name: t", "name: a b") % "",
        RULE % ", law: head",
        RULE % ", law: fixed",
        RULE % ", share: 30%",
        RULE % ", law: fixed, share: 0",
        RULE % ", weight: 0",
        RULE % ", ladder: []",
        RULE % ", ladder: [frezze]",
        RULE % ", limits: {memory: 40}",
        RULE % ", limits: {memory: 40Gi}",
        RULE % ", limits: {floor: 5}",
        SLO % "",
        SLO % ", signal: gpu_weight",
        SLO % ", signal: gpu_wait, port: 80",
        SLO % ", signal: http",
        SLO % ", signal: http, port: 70000",
        SLO % ", signal: http, port: 80, path: v1",
        SLO % ", signal: prometheus, metric: m",
        SLO % ", signal: prometheus, url: 'ftp://a', metric: m",
        SLO % ", signal: prometheus, url: 'http://a', metric: m_bucket",
        SLO % ", signal: uprobe, binary: /b",
        SLO % ", signal: uprobe, binary: /b, symbol: f, offset: 1",
        SLO % ", signal: uprobe, binary: b, symbol: f",
        SLO.replace("50ms", "50") % ", signal: gpu_wait",
        SLO.replace("0.9", "1") % ", signal: gpu_wait",
    ],
)
def test_what_the_schema_can_say_is_refused_by_both(text: str) -> None:
    assert not accepted(text)
    assert not SCHEMA.is_valid(read(text).data)


def test_it_is_a_schema_and_the_committed_one_is_the_generated_one() -> None:
    Draft7Validator.check_schema(json_schema())
    assert (ROOT / "docs/policy.schema.json").read_text() == json_schema_page(), "run: make docs"


def test_every_key_has_its_meaning_and_defaults_are_as_people_write_them() -> None:
    sections = json_schema()["$defs"]
    for section in sections.values():
        assert all(key.get("description") for key in section["properties"].values())
    assert sections["LimitsSection"]["properties"]["max_pause"]["default"] == "200ms"
    assert sections["SloSection"]["properties"]["min_samples"]["default"] == 20
    assert "null" not in json.dumps(sections)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_fits_it(path: Path) -> None:
    SCHEMA.validate(read(path.read_text()).data)
