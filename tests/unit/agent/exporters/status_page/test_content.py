# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the status page shows, and that no name of anything becomes markup."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import (
    CollectorHealth,
    Container,
    ContainerKey,
    ContainerUsage,
    DeviceHealth,
    DeviceReading,
    EnforcementStatus,
    Snapshot,
)
from agent.core.snapshot_json import encode
from agent.core.text import printable
from agent.exporters.status_page import routes
from agent.exporters.status_page.content import LONGEST, MOST_ROWS, DecisionRow, PageContent, Table, page
from agent.exporters.status_page.history import Ring
from agent.exporters.status_page.routes import PAGE
from tests.support.snapshots import GPU_0, NASTY, container, rich_snapshot, usage

NOW = rich_snapshot().wall_ns
DECISION = DecisionRow(NOW - 5_000_000_000, "trainer", "share 40–62 %, for 12 s", "slack 75 %: growing", True)
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "h1", "span", "p", "div", "main"),
    *("a", "code", "footer", "script"),
}
SINKS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacent",
    "document.write",
    "eval",
    "Function(",
    "srcdoc",
    "createContextual",
)
BREAKING = st.sampled_from(
    ['"', "'", "<", ">", "&", "</script>", "<!--", "\x00", "\u202e", "\udcff", "javascript:", "`"]
)
NAMES = st.lists(BREAKING | st.text(max_size=4), max_size=6).map("".join)


class Read(HTMLParser):
    """What a browser makes of a document, roughly: tags, attributes, texts."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.comments: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        (self.scripts if self.tags[-1:] == ["script"] else self.texts).append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def shown(
    snapshot: Snapshot | None, decisions: Sequence[DecisionRow] = (DECISION,), ring: Ring | None = None
) -> PageContent:
    return page(snapshot, ring or Ring(), decisions, "node-1", NOW, UTC)


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_it_has_devices_promises_containers_and_decisions() -> None:
    page = shown(rich_snapshot())
    devices, promises, containers, decisions = page.tables
    assert [table.title for table in page.tables] == [
        "Devices",
        "Latency promises",
        "Containers",
        "Recent decisions",
    ]
    assert page.headline.startswith("enforcing · 2026-11-18 ")
    assert texts(devices)[0][:4] == ["0", "NVIDIA H200", "83.0", "97.0Gi / 141Gi"]
    figures = ["p99, p50", "12.3 ms, 1.2 ms", "50 ms, 5 ms", "75 %", "kept"]
    assert texts(promises) == [["serving/chat-7c9d/chat", "chat", *figures]]
    assert [row[2] for row in texts(containers)][:4] == ["online", "online", "offline", "no rule"]
    assert texts(containers)[2][:4] == ["batch/train-0/trainer", "containerd", "offline", "0"]
    assert texts(containers)[2][4:9] == ["~48.0", "50.0Gi", "12.3k", "62.0", "35.0"]
    assert texts(decisions)[0][1:] == ["trainer", "share 40–62 %, for 12 s", "slack 75 %: growing"]
    for table in page.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_a_missed_promise_comes_first_and_has_negative_slack() -> None:
    snapshot = rich_snapshot()
    late = {ContainerKey("c3"): EnforcementStatus("online", "slow", 0.075, 0.999, 0.050, slack_ratio=-0.5)}
    (_, promises, _, _) = shown(replace(snapshot, enforcement={**snapshot.enforcement, **late})).tables
    assert texts(promises)[0] == ["twin", "slow", "p99.9", "75 ms", "50 ms", "−50 %", "missed"]


def test_unknown_is_a_dash_and_never_0() -> None:
    (devices, _, containers, _) = shown(rich_snapshot()).tables
    assert texts(devices)[2][2:8] == ["–", "– / 141Gi", "–", "–", "–", "–"]
    (host,) = (row for row in texts(containers) if row[0] == "host")
    assert host[4:] == ["–"] * 6


def test_warnings_are_shown_on_top() -> None:
    notes = "\n".join(note.text for note in shown(rich_snapshot()).notes)
    assert "the policy file was refused; the one read before stays in force" in notes
    assert "policy.yaml:12: " in notes
    assert "launches could not be read: map read failed: E2BIG" in notes
    assert "launches:full 12" in notes
    assert "old" not in notes
    late = page(rich_snapshot(), Ring(), (), "node-1", NOW + 30_000_000_000, UTC)
    assert late.notes[0].text.startswith("these figures are 30 s old")


def test_the_page_reports_that_there_is_no_snapshot_yet_or_no_policy() -> None:
    assert shown(None).headline == "nothing was observed yet"
    bare = shown(Snapshot(0, NOW, 0), ()).tables
    assert [table.remark for table in bare] == [
        "",
        "no container has one: a policy's online rules make them",
        "no container uses a GPU",
        "no policy decides",
    ]


def test_a_crowd_is_cut_to_the_busiest_and_the_rest_counted() -> None:
    crowd = tuple(ContainerUsage(container(f"k{n}", f"job-{n}"), (usage(GPU_0, n / 1000, 1),), ()) for n in range(1000))
    (_, _, containers, _) = shown(replace(rich_snapshot(), containers=crowd, unattributed=())).tables
    assert {row[0].text for row in containers.rows} == {f"job-{n}" for n in range(1000 - MOST_ROWS, 1000)}
    assert containers.remark == "and 800 more: see gputop or /metrics"
    assert len(json.dumps(encode(shown(replace(rich_snapshot(), containers=crowd))))) < 250_000


def test_names_are_shown_never_obeyed_and_bounded() -> None:
    assert printable(NASTY) in every_text(encode(shown(rich_snapshot())))
    long = ContainerUsage(container("c1", "x" * 100_000), (usage(GPU_0, 0.5, 1),), ())
    (_, _, containers, _) = shown(replace(rich_snapshot(), containers=(long,))).tables
    assert len(containers.rows[0][0].text) == LONGEST


def hostile(name: str) -> Snapshot:
    """Everything that has a name from outside has this one."""
    base = rich_snapshot()
    owner = Container(ContainerKey(name), name, name, pod=name, namespace=name)
    status = EnforcementStatus(
        "online", name, 0.1, 0.99, 0.2, share_ratio=0.5, reason=name, rungs=(name,), troubles={name: name}
    )
    readings = [DeviceReading(replace(reading.device, name=name)) for reading in base.devices]
    return replace(
        base,
        devices=tuple(readings),
        containers=(ContainerUsage(owner, (usage(GPU_0, 0.5, 1),), ()),),
        enforcement={ContainerKey(name): status},
        collectors=(CollectorHealth(name, 1.0, name),),
        health={GPU_0: DeviceHealth("unhealthy", name, 1.0, 1.0)},
        policy_error=name,
        lost={name: 1},
    )


@given(NAMES)
def test_every_text_can_be_shown_whatever_something_is_called(name: str) -> None:
    content = encode(page(hostile(name), Ring(), [DecisionRow(NOW, name, name, name, True)], name, NOW, UTC))
    if name:
        assert printable(name, LONGEST) in every_text(content)
    assert all(text.isprintable() for text in every_text(content))
    assert json.dumps(content).isascii()


def every_text(document: Any) -> Iterator[str]:
    """Every string of a JSON document."""
    if isinstance(document, str):
        yield document
    elif isinstance(document, Mapping):
        for value in document.values():
            yield from every_text(value)
    elif isinstance(document, Sequence):
        for value in document:
            yield from every_text(value)


def test_the_page_is_static_and_has_no_markup_but_its_own() -> None:
    read = Read(PAGE.document)
    assert set(read.tags) == TAGS
    assert read.tags.count("script") == read.tags.count("style") == 1
    assert read.scripts[0] == routes.SCRIPT
    assert not any(attribute.startswith("on") or attribute == "src" for attribute in read.attributes)
    assert {"/status.json", "/metrics"} == set(re.findall(r'href="(.*?)"', PAGE.document))


def test_its_script_makes_no_markup_of_what_it_is_given() -> None:
    assert not [sink for sink in SINKS if sink in routes.SCRIPT]


def test_the_content_security_policy_allows_the_two_texts_of_the_page_and_nothing_else() -> None:
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE.document, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in PAGE.policy
    assert PAGE.policy.startswith("default-src 'none'; ")
    assert "unsafe" not in PAGE.policy
    assert not re.search(r"""(src|href)=["'](https?:)?//""", PAGE.document)
