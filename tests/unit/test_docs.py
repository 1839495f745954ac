# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the documentation states of links, commands, metrics and policies is so."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from agent.exporters.prometheus.catalog import CATALOG
from fleet.exporter import Metrics
from gpuwarden.main import main
from tools.manual.__main__ import described
from tools.manual.site import on_page_markdown

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *SITE, ROOT / "sim/README.md"]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^][]*\]\(([^()\s]+)\)")
_COMMAND = re.compile(r"^(?:sudo )?(?:\.venv/bin/)?(gpuwarden|gputop)\b(.*)$", re.MULTILINE)
_METRIC = re.compile(r"\bgpuwarden_[a-z_]*[a-z]\b(?!…)")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The page without what stands there as it is."""
    return re.sub(r"`[^`\n]*`", "", _FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", _FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        found.add(f"{text}-{seen[text]}" if seen[text] else text)
        seen[text] += 1
    return found


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Commands that are shown to be typed: those in blocks, without placeholders for what may be left out."""
    for _, block in _FENCED.findall(page.read_text()):
        for program, rest in _COMMAND.findall(block):
            if not set("[|…") & set(rest.partition("#")[0]):
                yield program, rest


def is_understood(parser: argparse.ArgumentParser, words: list[str]) -> bool:
    try:
        _, unknown = parser.parse_known_args(words)
    except SystemExit:
        return False
    return not unknown


def exit_code(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@each_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c, d: e\n\n[x](#a-b-c-d-e) [y](gone.md)\n\n```\n[z](also-gone.md)\n```\n")
    assert anchors(page) == {"a-b-c-d-e"}
    with pytest.raises(AssertionError, match=r"gone\.md"):
        test_every_relative_link_leads_to_a_file_and_a_heading(page)


@each_page
def test_every_command_that_is_shown_is_one(page: Path) -> None:
    programs = dict(zip(("gpuwarden", "gputop"), described(), strict=True))
    wrong = [
        f"{program}{rest}"
        for program, rest in commands(page)
        if not is_understood(programs[program], shlex.split(rest, comments=True))
    ]
    assert not wrong


def test_commands_are_found_and_wrong_ones_noticed() -> None:
    assert ("gpuwarden", " check policy.yaml") in commands(ROOT / "docs/quick-start.md")
    warden, top = described()
    assert is_understood(top, ["--once"])
    assert not is_understood(warden, ["run", "--frobnicate"])


@each_page
def test_every_metric_that_is_named_exists(page: Path) -> None:
    fleets = {f"{one.name}{'_total' if one.type == 'counter' else ''}" for one in Metrics().families()}
    known = {metric.name for metric in CATALOG} | fleets
    named = set(_METRIC.findall(page.read_text()))
    assert not {name for name in named - known if not any(one.startswith(f"{name}_") for one in known)}


@each_page
def test_every_policy_that_is_shown_is_right(page: Path, tmp_path: Path) -> None:
    for language, block in _FENCED.findall(page.read_text()):
        if language == "yaml" and block.startswith("version: 1\n"):
            (tmp_path / "policy.yaml").write_text(block)
            assert exit_code("check", str(tmp_path / "policy.yaml")) == 0


def test_the_quick_start_gets_what_it_shows_from_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/quick-start.md").read_text()
    copied = re.search(r"^cp (docs/examples/\S+) policy\.yaml$", page, re.MULTILINE)
    assert copied
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_bytes((ROOT / copied[1]).read_bytes())
    Path("policy.yaml").chmod(0o644)
    assert exit_code("check", "policy.yaml") == 0
    assert capsys.readouterr().out in page


def test_the_operating_guide_has_the_figure_of_the_readme() -> None:
    readme, guide = (ROOT / "README.md").read_text(), (ROOT / "docs/operating.md").read_text()
    (ratio,) = re.findall(r"^\| the demo, held \| [^|]+ \| ([\d.]+) ", readme, re.MULTILINE)
    assert f"| online p99 under GPU Warden, to alone without any probe | {ratio} " in guide


def test_every_example_is_listed() -> None:
    listed = (ROOT / "docs/examples/README.md").read_text()
    missing = [path.name for path in sorted((ROOT / "docs/examples").glob("*.yaml")) if f"({path.name})" not in listed]
    assert not missing


@pytest.mark.parametrize("page", SITE, ids=lambda page: page.name)
def test_lists_tables_and_code_are_apart_from_the_text_before_them(page: Path) -> None:
    """GitHub does not mind, the web site does."""
    text = _FENCED.sub("```\n```", page.read_text())
    joined = re.findall(r"^(?![-#|`<\s]|\d+\.)(.+)\n(?:- |\| |```|1\. )", text, re.MULTILINE)
    assert not joined
    assert "```\n- " not in text


def on_the_site(text: str, name: str) -> str:
    """What the web site shows of the page's text."""
    return on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=name)))


def test_links_out_of_the_documentation_are_text_on_the_web_site() -> None:
    page = "[bpf/](../bpf), [a page](faq.md), [the\nreadme](../README.md#y), [x](../../sim/README.md#y)"
    assert on_the_site(page, "page.md") == "bpf/, [a page](faq.md), the\nreadme, x"
    assert on_the_site("[a page](../faq.md), [b](../../bpf/)", "examples/README.md") == "[a page](../faq.md), b"


@pytest.mark.parametrize("page", SITE, ids=lambda page: page.name)
def test_no_link_of_the_web_site_leads_out_of_it(page: Path) -> None:
    shown = on_the_site(page.read_text(), page.relative_to(ROOT / "docs").as_posix())
    links = [link for link in _LINK.findall(shown) if not link.startswith(("http://", "https://"))]
    targets = {link: (page.parent / link.partition("#")[0]).resolve() for link in links}
    assert not [link for link, target in targets.items() if not target.is_relative_to(ROOT / "docs")]


@pytest.mark.parametrize("path", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_describes_in_words_what_it_shows_and_asks_for_nothing_from_elsewhere(path: Path) -> None:
    tree = ElementTree.parse(path)
    kinds = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert "title" in kinds
    assert not kinds & {"script", "image", "foreignObject"}
    assert not re.search(r"(?:href|src|url)\s*[=(]\s*[\"']?https?:", path.read_text())
