# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page in a real browser: light, dark, without JavaScript, refreshed, and with names that try to do harm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from html import unescape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.core.clock import wall_ns
from agent.core.model import ContainerUsage, Snapshot
from agent.exporters.status_page import routes
from agent.exporters.status_page.content import CellKind, DecisionRow
from agent.exporters.status_page.history import Ring
from agent.exporters.status_page.routes import PAGE, SCRIPT, Site, StaticPage
from tests.support.browser import DARK, LIGHT, chromium, shades
from tests.support.serving import TcpServer
from tests.support.snapshots import GPU_0, container, rich_snapshot, usage

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></td><script>document.title='owned'</script>"


def with_script(script: str) -> StaticPage:
    """The page with one more script in it, which its policy would not let run."""
    return StaticPage(PAGE.document.replace(SCRIPT, SCRIPT + script), "")


def served(ring: Ring, page: StaticPage = PAGE) -> Site:
    """Each snapshot has another container: the first of them is called job-1, and each has a hostile one."""
    numbers = count(1)

    def snapshot() -> Snapshot:
        number = next(numbers)
        names = (f"job-{number}", HOSTILE)
        used = tuple(ContainerUsage(container(name, name), (usage(GPU_0, 0.4, 1 << 30),), ()) for name in names)
        made = replace(rich_snapshot(), at_ns=number * 1_000_000_000, wall_ns=wall_ns(), containers=used)
        ring.note(made)
        return made

    return Site(snapshot, ring, list, page)


LOOKS_AT_ITS_TEXTS = """
setInterval(() => {
if (!document.querySelector("section")) return;
const ground = (at) => {
    const colour = getComputedStyle(at).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && at.parentElement ? ground(at.parentElement) : colour;
};
const texts = [...document.querySelectorAll("body :not(script)")].filter(
    (one) => [...one.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim()));
document.body.dataset.texts = JSON.stringify(texts.filter(
    (one) => one.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && one.getClientRects().length
).map((one) => [one.closest("[class]")?.className ?? "", getComputedStyle(one).color, ground(one)]));
}, 500);
"""


def luminance(colour: str) -> float:
    """Of what a browser writes as rgb(…), as WCAG 2 defines it."""
    assert colour.startswith("rgb("), colour
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: str, ground: str) -> float:
    """From 1, which is not readable, to 21."""
    low, high = sorted((luminance(colour), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_each_kind_of_text_is_seen_and_can_be_read(tmp_path: Path, scheme: int) -> None:
    """With the contrast that WCAG 2 asks for (AA, 1.4.3)."""
    decisions = [DecisionRow(0, "trainer", "share 62 %", "slack 75 %", True)]
    rich = Site(rich_snapshot, Ring(), lambda: decisions, with_script(LOOKS_AT_ITS_TEXTS))
    with TcpServer(rich.routes()) as server:
        flags = ("--dump-dom", f"--blink-settings=preferredColorScheme={scheme}")
        done = chromium(f"{server.url}/", tmp_path / "profile", *flags)
    (found,) = re.findall('data-texts="(.*?)"', done.stdout)
    texts = {tuple(text) for text in json.loads(unescape(found))}
    assert {kind for kind, _, _ in texts} >= set(CellKind)
    assert not {text for text in texts if contrast(*text[1:]) < 4.5}


@pytest.mark.parametrize(("scheme", "bright"), [(LIGHT, True), (DARK, False)])
def test_it_is_light_or_dark_as_the_reader_prefers(tmp_path: Path, scheme: int, bright: bool) -> None:
    picture = tmp_path / "page.png"
    with TcpServer(served(Ring()).routes()) as server:
        flags = (f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
        chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", *flags)
    width, height, light, dark = shades(picture, tmp_path / "profile")
    assert (width, height) == (1280, 900)
    ground, text = (light, dark) if bright else (dark, light)
    assert ground > 0.9 * width * height
    assert text > 2000, "a page of it has several thousand"


def test_it_refreshes_itself_and_no_name_becomes_markup_or_breaks_its_own_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0.0)  # the browser's clock is much faster than ours
    with TcpServer(served(Ring()).routes()) as server:
        done = chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    (number,) = re.findall(r">job-(\d+)<", done.stdout)
    assert int(number) > 1, "it was not refreshed"
    assert "<svg" in done.stdout
    assert "<img" not in done.stdout
    assert len(re.findall("<script", done.stdout)) == 1
    assert "&lt;img src=x onerror=" in done.stdout
    assert "<title>GPU Warden: " in done.stdout


@pytest.mark.parametrize(("seconds", "refreshed"), [(50, False), (90, True)])
def test_what_a_reader_selects_stays_for_a_minute_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, refreshed: bool
) -> None:
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0.0)
    selecting = """
        const select = () => {
            const name = document.querySelector("td.name");
            if (name) getSelection().selectAllChildren(name);
            else setTimeout(select, 10);
        };
        select();
    """
    with TcpServer(served(Ring(), with_script(selecting)).routes()) as server:
        flags = ("--dump-dom", f"--virtual-time-budget={seconds * 1000}")
        done = chromium(f"{server.url}/", tmp_path / "profile", *flags)
    assert (">job-1<" not in done.stdout) == refreshed


def test_without_javascript_it_names_what_can_be_read_instead(tmp_path: Path) -> None:
    no_script = StaticPage(PAGE.document, "default-src 'none'; style-src 'unsafe-inline'")
    with TcpServer(served(Ring(), no_script).routes()) as server:
        done = chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", "--dump-dom")
    assert "Content Security Policy" in done.stderr
    main = done.stdout[done.stdout.index("<main>") : done.stdout.index("</main>")]
    assert "<section>" not in main
    assert "JavaScript draws the figures of this page: allow it here, or read" in main
    assert '<a href="/status.json">' in main
    assert '<a href="/metrics">' in main


def test_it_draws_every_table_and_graph(tmp_path: Path) -> None:
    ring, later = Ring(), replace(rich_snapshot(), wall_ns=wall_ns() + 3_600_000_000_000)
    for second in range(1, 200):
        ring.note(replace(later, at_ns=second * 1_000_000_000))
    decisions = [DecisionRow(0, "trainer", "share 62 %", "slack 75 %", True)]
    site = Site(lambda: later, ring, lambda: decisions)
    with TcpServer(site.routes()) as server:
        done = chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", "--dump-dom")
    body = unescape(done.stdout[done.stdout.index("<header>") : done.stdout.index("<script>")])
    figures = json.loads(site._fresh_figures())
    assert "allow it here" not in body
    assert body.count("<section>") == len(figures["tables"]) == 4
    for table in figures["tables"]:
        assert f"<h2>{table['title']}</h2>" in body
        for cell in [*table["columns"], *(cell for row in table["rows"] for cell in row)]:
            assert f">{cell['text']}</" in body
            if cell["graph"] is not None:
                assert f'<path d="{cell["graph"]["line"]}"></path>' in body
    assert body.count("<svg") == sum(
        cell["graph"] is not None for table in figures["tables"] for row in table["rows"] for cell in row
    )


@pytest.mark.parametrize("answers", [0, 1])
def test_an_agent_that_is_gone_is_reported(tmp_path: Path, answers: int) -> None:
    routes, left = dict(served(Ring()).routes()), iter(range(answers))
    figures = routes["/status.json"]

    def once(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        next(left)
        return figures(environ, start_response)

    with TcpServer({**routes, "/status.json": once}) as server:
        done = chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", "--dump-dom")
    text = "the agent does not answer: these figures are old" if answers else "the agent does not answer"
    assert f">{text}<" in done.stdout
    assert 'class="silent"' in done.stdout
    assert (">job-1<" in done.stdout) == bool(answers)
