# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The usage ledger's sums, whatever comes, goes, comes back, fails or restarts; and what the report states of them."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core.errors import UsageError
from agent.core.model import Container, ContainerUsage, DeviceReading, Snapshot, Totals, Unattributed, Usage
from agent.exporters.usage.amounts import MOST, AmountKind, Amounts, UsageKey, UsageRow, period
from agent.exporters.usage.query import By, Report, read
from agent.exporters.usage.recorder import Meter, UsageRecorder
from agent.exporters.usage.store import Store, UsageBatch
from gpuwarden.report import add_arguments, report
from tests.support.snapshots import GPU_0, GPU_1, NASTY, container, device

NOW = datetime(2026, 11, 21, 10, 20, tzinfo=UTC)
HOUR = int(datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp())
NS = 1_000_000_000
GIB = 1 << 30
EVER = 1 << 40
WEB = container("web", "web", pod="web-1", namespace="serving", image="web:1")
JOB = container("job", "job", pod="job-1", namespace="batch")
UNIT = container("unit", "unit", runtime="systemd")


def used(owner: Container, totals: Totals, memory: int | None = None, on: str = GPU_0) -> ContainerUsage:
    usage = Usage(GPU_0 if on == GPU_0 else GPU_1, None, None, memory, None, None, None, totals)
    return ContainerUsage(owner, (usage,), ())


def tick(
    *containers: ContainerUsage, at: int = HOUR, rest: Totals | None = None, rest_memory: int | None = None
) -> Snapshot:
    return Snapshot(
        at_ns=0,
        wall_ns=at * NS,
        interval_ns=NS,
        devices=(DeviceReading(device(0, GPU_0)), DeviceReading(device(1, GPU_1))),
        containers=containers,
        unattributed=(Unattributed(GPU_0, None, rest_memory, None, None, rest or Totals()),),
        device_totals={GPU_0: rest or Totals()},
    )


def everything(path: Path, *by: By) -> Report:
    return read(path, 0, EVER, by or (By.CONTAINER,))


def run(path: Path, *words: str) -> str:
    parser, out = ArgumentParser(), io.StringIO()
    add_arguments(parser)
    assert report(parser.parse_args(["--usage", str(path), *words]), NOW, out) == 0
    return out.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lib" / "usage.sqlite"


def written(path: Path, *ticks: Snapshot) -> None:
    with UsageRecorder(path, days=36_500, flush_seconds=3600) as ledger:
        for one in ticks:
            ledger.record(one)


def container_sums(meter: Meter, *ticks: Snapshot) -> Counter[str]:
    launches: Counter[str] = Counter()
    for one in ticks:
        for booking, amounts in meter.read(one):
            if booking.kind is AmountKind.CONTAINER:
                launches[booking.owner] += amounts.launches
    return launches


def test_a_total_counts_from_zero_then_by_its_growth_and_from_zero_again_once_it_fell() -> None:
    ticks = [tick(used(WEB, Totals(launches=n))) for n in (5, 9, 9, 2, 3)]
    assert container_sums(Meter(), *ticks) == {"web": 9 + 3}


def test_a_container_that_is_absent_for_a_while_goes_on_where_it_was() -> None:
    ticks = [tick(used(WEB, Totals(launches=5))), tick(), tick(used(WEB, Totals(launches=7)))]
    assert container_sums(Meter(), *ticks) == {"web": 7}


def ended(snapshot: Snapshot, *gone: ContainerUsage) -> Snapshot:
    return Snapshot(0, snapshot.wall_ns, snapshot.interval_ns, containers=snapshot.containers, ended=gone)


def test_final_totals_of_an_ended_container_count_once_and_a_new_life_counts_from_zero() -> None:
    last = used(WEB, Totals(launches=8))
    ticks = [
        tick(used(WEB, Totals(launches=5))),
        ended(tick(), last),
        ended(tick(), last),
        tick(),
        tick(used(WEB, Totals(launches=9))),
    ]
    assert container_sums(Meter(), *ticks) == {"web": 8 + 9}


def test_an_ended_container_that_lives_again_while_it_is_kept_goes_on() -> None:
    last = used(WEB, Totals(launches=8))
    ticks = [ended(tick(), last), tick(used(WEB, Totals(launches=9))), ended(tick(), used(WEB, Totals(launches=11)))]
    assert container_sums(Meter(), *ticks) == {"web": 11}


def test_the_meter_drops_the_longest_absent_first_and_reports_it() -> None:
    meter = Meter(max_totals=8)
    for n in range(100):
        container_sums(meter, tick(used(container(f"c{n}", "c"), Totals(launches=1))))
    assert meter.forgotten > 80
    assert len(meter._last) == 8


def test_memory_is_booked_over_time_and_the_unknown_is_not(path: Path) -> None:
    written(path, *[tick(used(WEB, Totals(), memory), at=HOUR + n) for n, memory in enumerate((GIB, None, 3 * GIB))])
    assert everything(path).total == Amounts(memory_byte_seconds=4 * GIB)


def test_names_that_come_later_are_shown_for_all_rows(path: Path) -> None:
    nameless = replace(WEB, pod=None, namespace=None)
    written(path, tick(used(nameless, Totals(launches=1))), tick(used(WEB, Totals(launches=1))))
    assert [(g.namespace, g.pod, a.launches) for g, a in everything(path, By.POD).rows.items()] == [
        ("serving", "web-1", 1)
    ]
    written(path, tick(used(nameless, Totals(launches=5))))
    assert [g.pod for g in everything(path, By.POD).rows] == ["web-1"], "a name that is known is not lost again"


def test_what_a_failing_write_was_to_hold_is_written_later_and_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with UsageRecorder(path, flush_seconds=3600, days=36_500) as ledger:
        ledger.record(tick(used(WEB, Totals(launches=5))))
        with monkeypatch.context() as broken:
            broken.setattr(Store, "add", full)
            assert not ledger.flush()
            ledger.record(tick(used(WEB, Totals(launches=7))))
            assert not ledger.flush()
        with monkeypatch.context() as broken:
            broken.setattr(Store, "prune", full)
            assert not ledger.flush(), "written, but not pruned"
        assert ledger.losses()["usage:failed_writes"] == 3
        ledger.record(tick(used(WEB, Totals(launches=8))))
    assert everything(path).total.launches == 8


@pytest.mark.parametrize("beyond", [1 << 61, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_no_number_stops_the_ledger_or_its_report(path: Path, beyond: int) -> None:
    liar, hours = container("liar", "liar"), 12
    with UsageRecorder(path, flush_seconds=3600, days=36_500) as ledger:
        for hour in range(2 * hours):  # two flushes in each
            total = beyond * (hour + 1)
            lie = Totals(launches=total, pcie_tx_bytes=total, pcie_rx_bytes=total)
            web = used(WEB, Totals(launches=5 + hour))
            ledger.record(tick(web, used(liar, lie), at=HOUR + hour // 2 * 3600))
            assert ledger.flush()
        assert ledger.losses()["usage:cut_amounts"] == 2 * hours
    rows = {group.container: amounts.launches for group, amounts in everything(path).rows.items()}
    assert rows == {"web": 5 + 2 * hours - 1, "liar": hours * MOST}


def test_a_report_reads_rows_that_an_older_agent_wrote_beyond_63_bits(path: Path) -> None:
    written(path, tick(used(WEB, Totals(launches=5))))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE usage SET pcie_tx_bytes = 1e19, launches = 9223372036854775807")
        db.execute("INSERT INTO usage SELECT hour + 3600, owner, device, 0, 0, 1e19, 0, launches FROM usage")
    assert everything(path).total.launches == 2 * ((1 << 63) - 1)


def test_what_waits_for_a_write_is_bounded_and_the_rest_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with UsageRecorder(path, flush_seconds=3600, days=36_500, max_waiting=10) as ledger:
        ledger.record(tick(*(used(container(f"c{n}", "c"), Totals(launches=1)) for n in range(25))))
        assert ledger.losses()["usage:dropped_amounts"] == 15
    assert everything(path).total.launches == 10


def test_old_hours_go_and_then_the_oldest_until_the_rows_fit(path: Path) -> None:
    hours = [HOUR + 3600 * n for n in range(5)]
    written(path, *[tick(used(WEB, Totals(launches=n + 1)), at=hour) for n, hour in enumerate(hours)])
    store = Store(path, max_rows=2)
    assert store.prune(hours[-1], 5) == 2  # one of the five is that in which the test runs
    store.close()
    left = everything(path, By.HOUR)
    assert [group.hour for group in left.rows] == hours[3:]
    assert left.dropped_rows == 2
    store = Store(path)
    assert store.prune(EVER, 1) == 0
    assert store._db.execute("SELECT count(*) FROM owner").fetchone() == (0,)
    store.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 1 << 40).map(lambda hour: hour * 3600), min_size=1, max_size=12, unique=True))
def test_whatever_the_clock_says_the_last_hours_to_come_are_the_ones_that_stay(hours: list[int]) -> None:
    """A step by years deletes nothing, forward or back."""
    kept = 5
    with TemporaryDirectory() as folder:
        path = Path(folder) / "usage.sqlite"
        store = Store(path)
        for hour in hours:
            row = UsageRow(hour, UsageKey(AmountKind.CONTAINER, WEB.key, GPU_0))
            store.add(UsageBatch({row: Amounts(launches=1)}, {}, {}))
            store.prune(hour, kept)
        left = {hour for (hour,) in store._db.execute("SELECT DISTINCT hour FROM usage")}
        store.close()
    assert left == set(hours[-kept:])


def test_a_file_that_was_moved_away_is_created_again(path: Path) -> None:
    with UsageRecorder(path, flush_seconds=3600, days=36_500) as ledger:
        ledger.record(tick(used(WEB, Totals(launches=5))))
        ledger.flush()
        path.rename(path.with_suffix(".old"))
        ledger.record(tick(used(WEB, Totals(launches=7))))
        assert ledger.flush()
    assert everything(path).total.launches == 2


LIVES = st.lists(
    st.tuples(
        st.sampled_from([WEB, JOB, UNIT]),
        st.sampled_from([GPU_0, GPU_1]),
        st.tuples(st.integers(0, 1 << 40), st.integers(0, 10**6), st.integers(0, 1 << 40), st.integers(0, 64)),
        st.booleans(),  # had ended and been forgotten before this tick
    ),
    max_size=6,
    unique_by=lambda life: (life[0].key, life[1]),
)
ACTS = st.sampled_from(["tick", "tick", "tick", "absent", "flush", "restart"])
STEPS = st.lists(st.tuples(ACTS, st.integers(0, 3), LIVES), max_size=12)


def _totals(sums: Amounts) -> Totals:
    return Totals(sums.sm_seconds, sums.launches, sums.pcie_tx_bytes, sums.pcie_rx_bytes)


class Truth:
    """An agent's totals as they should be, and its snapshots."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str, int], Amounts] = {}
        self.totals: dict[tuple[str, str], Amounts] = {}
        self.rest = 0

    def step(self, hour: int, lives: Sequence[tuple[Container, str, tuple[int, int, int, int], bool]]) -> Snapshot:
        """The next snapshot. A second life can be distinguished from the first where it has less of something."""
        memory: dict[tuple[str, str], int] = {}
        owners = {str(one.key): one for one in (WEB, JOB, UNIT)}
        for owner, on, (tx, launches, rx, gib), restarted in lives:
            key = (str(owner.key), on)
            more = Amounts(launches / 64, 0.0, tx, rx, launches)
            if restarted and launches < self.totals.get(key, Amounts()).launches:
                del self.totals[key]
            self.totals.setdefault(key, Amounts()).add(more)
            memory[key] = gib * GIB
            self.sums.setdefault((*key, hour), Amounts()).add(more)
        for key, held in memory.items():
            self.sums[*key, hour].memory_byte_seconds += held
        self.rest += len(lives)
        self.sums.setdefault(("", GPU_0, hour), Amounts()).add(Amounts(launches=len(lives)))
        containers = tuple(
            used(owners[key], _totals(sums), memory.get((key, on)), on) for (key, on), sums in self.totals.items()
        )
        return tick(*containers, at=hour, rest=Totals(launches=self.rest))

    def restart(self) -> None:
        self.totals.clear()
        self.rest = 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_the_ledger_adds_up_to_what_was_used_however_it_is_grouped(
    steps: list[tuple[str, int, list[tuple[Container, str, tuple[int, int, int, int], bool]]]],
) -> None:
    truth = Truth()
    hour = HOUR
    with TemporaryDirectory() as folder:
        path = Path(folder) / "usage.sqlite"
        ledger = UsageRecorder(path, flush_seconds=3600, days=36_500).__enter__()
        for act, hours, lives in steps:
            hour += 3600 * hours
            if act == "restart":
                ledger.__exit__()
                ledger = UsageRecorder(path, flush_seconds=3600, days=36_500).__enter__()
                truth.restart()
            elif act == "flush":
                ledger.flush()
            elif act == "absent":
                ledger.record(replace(tick(at=hour), unattributed=(), device_totals={}))
            else:
                ledger.record(truth.step(hour, lives))
        ledger.__exit__()
        total = Amounts()
        for one in truth.sums.values():
            total.add(one)
        for by in ([By.CONTAINER], [By.POD], [By.NAMESPACE], [By.DEVICE], [By.HOUR], [By.IMAGE], list(By)):
            found = everything(path, *by)
            assert found.total == total
            parts = Amounts()
            for amounts in found.rows.values():
                parts.add(amounts)
            assert parts == total
        exact = {(g.key, g.device, g.hour): a for g, a in everything(path, *By).rows.items()}
        assert exact == {key: amounts for key, amounts in truth.sums.items() if amounts}


def test_a_report_adds_up_with_the_unattributed_and_what_the_limit_cuts(path: Path) -> None:
    ticks = tick(used(WEB, Totals(8.0, 5)), used(JOB, Totals(4.0)), used(UNIT, Totals(2.0)), rest=Totals(1.0))
    written(path, ticks)
    found = json.loads(run(path, "--by", "namespace", "--limit", "2", "--json"))
    assert found["schema"] == "gpuwarden.usage/1"
    assert [(row["kind"], row["namespace"], row["sm_seconds"]) for row in found["rows"]] == [
        ("container", "serving", 8.0),
        ("container", "batch", 4.0),
    ]
    assert found["others"]["sm_seconds"] == 3.0
    assert found["total"]["sm_seconds"] == 15.0
    assert found["devices"]["sm_seconds"] == 1.0
    assert found["since"] == "2026-11-20T10:00:00Z"
    assert found["until"] == "2026-11-21T11:00:00Z"
    text = run(path, "--by", "pod,device", "--sort", "name")
    assert "(unattributed)" in text
    assert "15.0" in text
    assert "the devices themselves counted 1.0 SM seconds" in text


def test_hostile_names_are_shown_and_never_obeyed(path: Path) -> None:
    evil = Container(WEB.key, NASTY + "\udc80'); DROP TABLE usage;--", "docker", namespace="=cmd|' /C calc'!A0")
    written(path, tick(used(evil, Totals(launches=3))))
    for words in ((), ("--by", "namespace"), ("--csv",)):
        assert all(line.isprintable() for line in run(path, *words).split("\n"))
    assert r"\x1b[31mevil[/][bold]" in run(path)
    (row,) = json.loads(run(path, "--json"))["rows"]
    assert row["launches"] == 3
    rows = list(csv.DictReader(io.StringIO(run(path, "--csv", "--by", "namespace"))))
    assert [row["namespace"] for row in rows if row["kind"] == "container"] == ["'=cmd|' /C calc'!A0"]


def test_what_was_not_asked_for_is_not_in_the_report(path: Path) -> None:
    written(path, tick(used(WEB, Totals(launches=1)), at=HOUR - 7200), tick(used(WEB, Totals(launches=3)), at=HOUR))
    assert json.loads(run(path, "--since", "1h", "--json"))["total"]["launches"] == 2
    before = json.loads(run(path, "--since", "start", "--until", "2026-11-21T09:00+00:00", "--json"))
    assert before["total"]["launches"] == 1
    assert "no use was recorded" in run(path, "--since", "3w", "--until", "2w")


@pytest.mark.parametrize(
    "words",
    [
        ("--since", "yesterday"),
        ("--since", "999999w"),
        ("--since", "1h", "--until", "2d"),
        ("--by", "weather"),
        ("--limit", "0"),
        ("--json", "--csv"),
    ],
)
def test_a_question_that_is_none_is_refused_with_how_to_ask(path: Path, words: tuple[str, ...]) -> None:
    written(path)
    with pytest.raises(UsageError, match=words[0]):
        run(path, *words)


def test_a_period_is_widened_to_whole_hours_and_has_the_local_time_zone() -> None:
    zone = NOW.astimezone()
    assert period("24h", None, zone) == (HOUR - 24 * 3600, HOUR + 3600)
    assert period("2026-11-21T08:30+02:00", "2026-11-21T10:00+00:00", zone) == (HOUR - 4 * 3600, HOUR)
    assert period("start", "now", zone) == (0, HOUR + 3600)
    assert period("90m", None, zone + timedelta(hours=1)) == (HOUR - 3600, HOUR + 2 * 3600)
