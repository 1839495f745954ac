# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page in a real browser: light, dark, without JavaScript, refreshed, and with names that try to do harm."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from itertools import count
from pathlib import Path

import pytest

from agent import web
from agent.clock import wall_ns
from agent.model import ContainerUsage, Snapshot
from agent.page import html, site
from agent.page.content import Kind, Told
from agent.page.ring import Ring
from agent.page.site import Site
from tests.contract.browser import DARK, LIGHT, chromium, shades
from tests.unit.snapshots import GPU_0, container, rich_snapshot, usage

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></td><script>document.title='owned'</script>"


def served(ring: Ring) -> Site:
    """Each snapshot has another container: the first of them is called job-1, and each has a hostile one."""
    numbers = count(1)

    def snapshot() -> Snapshot:
        number = next(numbers)
        names = (f"job-{number}", HOSTILE)
        used = tuple(ContainerUsage(container(name, name), (usage(GPU_0, 0.4, 1 << 30),), ()) for name in names)
        made = replace(rich_snapshot(), at_ns=number * 1_000_000_000, wall_ns=wall_ns(), containers=used)
        ring.note(made)
        return made

    return Site(snapshot, ring, list)


LOOKS_AT_ITS_TEXTS = """
const ground = (at) => {
    const colour = getComputedStyle(at).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && at.parentElement ? ground(at.parentElement) : colour;
};
const texts = [...document.querySelectorAll("body :not(script)")].filter(
    (one) => [...one.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim()));
document.body.dataset.texts = JSON.stringify(texts.filter(
    (one) => one.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && one.getClientRects().length
).map((one) => [one.closest("[class]")?.className ?? "", getComputedStyle(one).color, ground(one)]));
"""


def luminance(colour: str) -> float:
    """Of what a browser writes as rgb(…), as WCAG 2 defines it."""
    assert colour.startswith("rgb("), colour
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour: str, ground: str) -> float:
    """From 1, which nobody can read, to 21."""
    low, high = sorted((luminance(colour), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_each_kind_of_text_is_seen_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: int
) -> None:
    """With the contrast that WCAG 2 asks for (AA, 1.4.3)."""
    monkeypatch.setattr(html, "SCRIPT", LOOKS_AT_ITS_TEXTS)
    monkeypatch.setattr(html, "POLICY", "")
    rich = Site(rich_snapshot, Ring(), lambda: [Told(0, "trainer", "share 62 %", "slack 75 %", True)])
    with web.serve("127.0.0.1", 0, rich.routes()) as server:
        flags = ("--dump-dom", f"--blink-settings=preferredColorScheme={scheme}")
        done = chromium(f"{server.url}/", tmp_path / "profile", *flags)
    (found,) = re.findall('data-texts="(.*?)"', done.stdout)
    texts = {tuple(text) for text in json.loads(unescape(found))}
    assert {kind for kind, _, _ in texts} >= set(Kind)
    assert not {text for text in texts if contrast(*text[1:]) < 4.5}


@pytest.mark.parametrize(("scheme", "bright"), [(LIGHT, True), (DARK, False)])
def test_it_is_light_or_dark_as_the_reader_prefers(tmp_path: Path, scheme: int, bright: bool) -> None:
    picture = tmp_path / "page.png"
    with web.serve("127.0.0.1", 0, served(Ring()).routes()) as server:
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
    monkeypatch.setattr(site, "FRESH_SECONDS", 0.0)  # the browser's clock is much faster than ours
    with web.serve("127.0.0.1", 0, served(Ring()).routes()) as server:
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
def test_what_somebody_selects_stays_for_a_minute_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, refreshed: bool
) -> None:
    monkeypatch.setattr(site, "FRESH_SECONDS", 0.0)
    selecting = 'getSelection().selectAllChildren(document.querySelector("td.name"));'
    monkeypatch.setattr(html, "SCRIPT", html.SCRIPT + selecting)
    monkeypatch.setattr(html, "POLICY", "")
    with web.serve("127.0.0.1", 0, served(Ring()).routes()) as server:
        flags = ("--dump-dom", f"--virtual-time-budget={seconds * 1000}")
        done = chromium(f"{server.url}/", tmp_path / "profile", *flags)
    assert (">job-1<" not in done.stdout) == refreshed


def test_without_javascript_it_is_what_it_is_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is also to say that both who draw it draw the same."""
    ring, later = Ring(), replace(rich_snapshot(), wall_ns=wall_ns() + 3_600_000_000_000)
    for second in range(1, 200):
        ring.note(replace(later, at_ns=second * 1_000_000_000))
    still = Site(lambda: later, ring, lambda: [Told(0, "trainer", "share 62 %", "slack 75 %", True)])
    drawn: dict[bool, str] = {}
    with web.serve("127.0.0.1", 0, still.routes()) as server:
        for policy in (html.POLICY, "default-src 'none'; style-src 'unsafe-inline'"):
            monkeypatch.setattr(html, "POLICY", policy)  # the second lets no script run
            done = chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", "--dump-dom")
            body = done.stdout[done.stdout.index("<header>") : done.stdout.index("<script>")]
            drawn["Content Security Policy" in done.stderr] = body
    assert drawn.keys() == {False, True}
    assert drawn[False] == drawn[True]
    assert drawn[True].count("<section>") == 4


def test_an_agent_that_is_gone_is_said(tmp_path: Path) -> None:
    only_once = {"/": served(Ring()).routes()["/"]}
    with web.serve("127.0.0.1", 0, only_once) as server:
        done = chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", "--dump-dom")
    assert "the agent does not answer: these figures are old" in done.stdout
    assert 'class="silent"' in done.stdout
    assert ">job-1<" in done.stdout
