# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The documentation of the policy states what the code checks."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest

from agent.config.sections import Section, describe, section_of
from enforce.controller import laws
from enforce.policy import model, schema
from enforce.policy.annotations import KEYS
from enforce.policy.load import parse
from enforce.signals.registry import BUILTIN
from gpuwarden.check import check
from tools.manual.policy_reference import page

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "docs/examples").glob("*.yaml"))


def test_the_committed_page_is_the_generated_one() -> None:
    assert (ROOT / "docs/policy.md").read_text() == page(), (
        "run: python -m tools.manual.policy_reference > docs/policy.md"
    )


def test_every_key_is_explained_and_has_a_kind() -> None:
    seen: list[type[Section]] = [schema.PolicySection]
    for section in seen:
        assert section.__doc__
        for key, info in section.model_fields.items():
            inner = section_of(info)
            assert info.description, key
            assert inner or describe(info), key
            seen += [inner] if inner and inner not in seen else []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_check_accepts_every_example_without_a_warning(path: Path) -> None:
    out = StringIO()
    assert check(path, False, None, out) == 0
    assert len(out.getvalue().splitlines()) == 1, out.getvalue()


def test_the_page_names_every_annotation() -> None:
    keys = {key.replace("_", "-") for keys in KEYS.values() for key in keys} | {"class", "slo-p99"}
    section = page().partition("## Pod annotations")[2].partition("##")[0]
    assert set(re.findall(r"`(?:gpuwarden\.io|…)/([a-z0-9-]+)`", section)) == keys


def test_the_policy_on_the_page_is_right() -> None:
    example, _annotations = re.findall(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert parse(example, "page").enforce


def test_a_policy_can_name_every_signal_and_law_that_exists_and_no_other() -> None:
    assert {signal.name for signal in BUILTIN} == set(model.SIGNALS)
    assert len(laws.BUILTIN) == len(model.LAWS)


@pytest.mark.parametrize("law", model.LAWS)
def test_a_law_that_a_policy_names_is_the_law_that_it_gets(law: str) -> None:
    share = "share: 30%" if law == "fixed" else "weight: 1"
    policy = parse(f"version: 1\noffline: [{{name: t, match: {{pod: x}}, law: {law}, {share}}}]\n", "p")
    rule = policy.offline[0]
    assert laws.law_of(rule, policy.tuning).name == law
