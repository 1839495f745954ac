# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page in a real browser: light, dark, without JavaScript, refreshed, and with names that try to do harm."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from agent import web
from agent.clock import wall_ns
from agent.model import ContainerUsage, Snapshot
from agent.page import html, site
from agent.page.content import Told
from agent.page.ring import Ring
from agent.page.site import Site
from tests.contract.browser import DARK, LIGHT, chromium, size_and_corner
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


@pytest.mark.parametrize(("scheme", "bright"), [(LIGHT, True), (DARK, False)])
def test_it_is_light_or_dark_as_the_reader_prefers(tmp_path: Path, scheme: int, bright: bool) -> None:
    picture = tmp_path / "page.png"
    with web.serve("127.0.0.1", 0, served(Ring()).routes()) as server:
        flags = (f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
        chromium(f"http://127.0.0.1:{server.port}/", tmp_path / "profile", *flags)
    shape, corner = size_and_corner(picture)
    assert shape == (1280, 900)
    assert (min(corner) > 200) if bright else (max(corner) < 60)


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
