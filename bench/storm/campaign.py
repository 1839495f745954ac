# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One storm: each act is prepared, done, and judged from outside; then the node is made ready for the next one.

What an act leaves broken is noted and mended here, so that it is not found again after the next one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.core.errors import SetupError
from bench.storm import agents
from bench.storm.acts import CLOSED_RATIO, Act, Blow, Kind, Moment, Shortage, Victims
from bench.storm.agents import Agents
from bench.storm.figures import Outcome
from bench.storm.observe import SignalCounts, Trace, Traces, changed_code_bytes, look, watch
from bench.storm.workloads import Standing, Watched, Workloads, start_all
from enforce.ledger import ledger
from tools.harness import cgroups
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.stage import Cpus, Stage, open_stage
from tools.harness.wait import poll, until

_ROOT: Final = Path(__file__).resolve().parents[2]
_LIBRARY: Final = BUILD / "lib" / "libcuda.so.1"
_QUICK: Final = (Standing.STOPPED, Standing.FROZEN)
_BY_THE_KERNEL: Final = (Standing.STOPPED,)
_RUNS_WITHIN_SECONDS: Final = 10.0
_WORKS_WITHIN_SECONDS: Final = 30.0
_ENFORCES_WITHIN_SECONDS: Final = 60.0
_FROZEN_WITHIN_SECONDS: Final = 20.0
_GONE_WITHIN_SECONDS: Final = 30.0
_BREAKS: Final = {
    Standing.STOPPED: "left_stopped",
    Standing.FROZEN: "left_frozen",
    Standing.LOCKED: "left_locked",
    Standing.LIMITED: "left_limited",
}


@dataclass(slots=True)
class Storm:
    """The node, what runs on it, and the agents that are hurt."""

    stage: Stage[Node]
    workloads: Workloads
    agents: Agents
    signals: SignalCounts
    _touched: dict[str, dict[str, int]] = field(default_factory=dict)
    _copies: int = 0

    def perform(self, act: Act) -> Outcome:
        """One act."""
        outcome = Outcome(act)
        with ExitStack() as stack:
            try:
                self._lead_up_to(act, outcome, stack)
                self._hurt(act, outcome, stack)
            except SetupError as error:
                outcome.skipped = str(error)
            except TimeoutError as error:
                outcome.breaks("not_enforced_again", str(error))
                self.agents.kill()
        self._judge_untouchable(outcome)
        self._judge_ended(outcome)
        return outcome

    def _lead_up_to(self, act: Act, outcome: Outcome, stack: ExitStack) -> None:
        """Returns at the moment of the act."""
        if act.moment is Moment.START:
            for code in self.agents.end():
                if code:
                    outcome.breaks("left_processes", f"an agent ended with {code}")
            self._start(act)
        else:
            self._until_enforcing(act)
            self._begin(act, stack)
        if act.moment is Moment.UPGRADE:
            time.sleep(act.delay_seconds * act.draw)
            self._start(act)
            time.sleep(act.delay_seconds * (1 - act.draw))
        else:
            time.sleep(act.delay_seconds)

    def _start(self, act: Act) -> None:
        self.agents.start(closed=act.draw < CLOSED_RATIO)

    def _until_enforcing(self, act: Act) -> None:
        """An agent runs, and an offline process is stopped by it."""
        gated = [one for one in self.workloads.offline if one.role == "gated"]

        def enforces() -> bool:
            if not self.agents.alive():
                self._start(act)
            return self.agents.answers() and bool(look(gated, _QUICK)) and len(self.agents.recovering()) == 2

        until(enforces, "an agent that enforces", _ENFORCES_WITHIN_SECONDS)

    def _begin(self, act: Act, stack: ExitStack) -> None:
        """What the moment is counted from."""
        if act.moment is Moment.RELOAD:
            self.agents.reload()
        elif act.moment is Moment.FREEZE:
            poll(lambda: look(self.workloads.offline, (Standing.FROZEN,)), _FROZEN_WITHIN_SECONDS, 0.002)
        elif act.moment is Moment.CHECKPOINT:
            poll(self._is_checkpointed, _FROZEN_WITHIN_SECONDS, 0.01)
        elif act.moment is Moment.ATTACH:
            stack.enter_context(self._another_library())
        elif act.moment is Moment.UPGRADE:
            self.agents.alive()[0].terminate()

    def _is_checkpointed(self) -> bool:
        return any(entry.act in ("lock", "swap") for entry in ledger.read(self.agents.ledger))

    @contextmanager
    def _another_library(self) -> Iterator[None]:
        """A job with a copy of the driver library, which has no probes yet."""
        self._copies += 1
        copy = self.stage.folder / f"copy-{self._copies}" / _LIBRARY.name
        copy.parent.mkdir()
        copy.write_bytes(_LIBRARY.read_bytes())
        command = [str(BUILD / "bin" / "offline"), "--seconds", "0", "--iterations-per-us", "100"]
        job = self.stage.run("gated", command, {"LD_LIBRARY_PATH": str(copy.parent)})
        watched = Watched("gated", job.process, job.cgroup)
        self.workloads.offline.append(watched)
        try:
            yield
        finally:
            self.workloads.offline.remove(watched)
            watched.close()
            self.stage.end([job])

    def _hurt(self, act: Act, outcome: Outcome, stack: ExitStack) -> None:
        """The act itself, and until all run."""
        kind = act.kind
        memory = stack.enter_context(agents.short_memory()) if kind.blow is Blow.OOM else None
        enforced = not kind.idles_agent or (act.moment is Moment.UPGRADE and kind.victims is Victims.AGENT)
        released = kind.victims not in (Victims.ALL, Victims.BACKSTOP)
        with ExitStack() as short:
            self._run_short(act, short)
            tgids = self.agents.victims(kind.victims, act.draw)
            if not tgids:
                raise SetupError("there was none to hurt at that moment")
            pidfds = short.enter_context(agents.opened(tgids))
            before = {one.name: one.progress() for one in self.workloads.slow}
            strike = agents.blow(kind.blow, pidfds, tgids, memory)
            kinds, seconds = _QUICK if kind.idles_agent else _BY_THE_KERNEL, _RUNS_WITHIN_SECONDS if released else 0.0
            trace, began = watch(self.workloads.offline, kinds, strike, enforced=enforced, seconds=seconds)
            outcome.met = len(trace.met)
            self._count_out(kind, tgids, pidfds)
            if released:
                outcome.stood_ms = trace.stood_seconds(enforced=enforced) * 1e3
                self._judge_standing(trace, outcome, enforced)
            if kind.ends_agent and not enforced:
                self._judge_release(act, outcome, before, began)
            if kind.blow is Blow.STOP:
                agents.send(pidfds, signal.SIGCONT)

    def _count_out(self, kind: Kind, tgids: Sequence[int], pidfds: Sequence[int]) -> None:
        """Those that were killed are no agents any more."""
        if kind.blow is Blow.OOM:
            agents.send(pidfds[:1], signal.SIGKILL)  # where the kernel found what it needs elsewhere
        if kind.blow is not Blow.STOP:
            self.agents.count_out(tgids)

    def _run_short(self, act: Act, stack: ExitStack) -> None:
        if act.kind.shortage is Shortage.DISK:
            stack.enter_context(agents.full(self.agents.run_dir))
        elif act.kind.shortage is Shortage.DESCRIPTORS:
            stack.enter_context(agents.no_descriptors(self.agents.victims(Victims.BOTH, 0.0)))

    def _judge_standing(self, trace: Trace, outcome: Outcome, enforced: bool) -> None:
        """No workload stands still; where it is enforced, none that stood at the act has done so ever since."""
        since = trace.met.keys() - trace.ran.keys()
        left = {name: kind for name, kind in trace.standing.items() if not enforced or name in since}
        for name, kind in left.items():
            outcome.breaks(_BREAKS[kind], name)
        if left:
            self._rescue()

    def _judge_release(self, act: Act, outcome: Outcome, before: dict[str, int], began: float) -> None:
        """No agent runs: all is undone, by what survived, or by what undoes it when none has."""
        if act.kind.victims is Victims.ALL:
            self._release(act)
        slow = list(self.workloads.slow)

        def works(one: Watched) -> bool:
            return one.progress() > before[one.name] + 1

        def all_work() -> bool:
            return all(map(works, slow)) and not look(self.workloads.offline, _QUICK)

        if poll(all_work, _WORKS_WITHIN_SECONDS):
            outcome.slow_ms = (time.monotonic() - began) * 1e3
        for name, kind in look(self.workloads.offline, _QUICK).items():
            outcome.breaks(_BREAKS[kind], name)
        for one in slow:
            if not works(one):
                outcome.breaks(_BREAKS[_standing_of(one)], one.name)
        self._judge_ledger(act, outcome)
        if outcome.broken:
            self._rescue()

    def _judge_ledger(self, act: Act, outcome: Outcome) -> None:
        """It can be read, and has nothing outstanding once those that recover have ended."""
        path = self.agents.ledger
        if act.moment is Moment.UPGRADE and self.agents.alive():
            return
        poll(lambda: not self.agents.recovering(), _GONE_WITHIN_SECONDS)
        if (why := ledger.unreadable(path)) is not None:
            outcome.breaks("ledgers_unreadable", why)
        elif act.kind.shortage is not Shortage.DISK:  # else no entry can be closed
            for entry in ledger.read(path):
                outcome.breaks("ledger_entries_left", entry.id)

    def _release(self, act: Act) -> None:
        """What is to be done when all three are gone: the command, or the next start."""
        if act.draw < 0.5:
            run_release(self.agents.run_dir, self.agents.environment)
        else:
            self._start(act)
            until(lambda: self.agents.answers() or not self.agents.alive(), "the next start", _ENFORCES_WITHIN_SECONDS)
            self.agents.end()

    def _rescue(self) -> None:
        """All run again, whatever was left."""
        run_release(self.agents.run_dir, self.agents.environment)
        for one in self.workloads.offline:
            with suppress(ProcessLookupError):
                os.kill(one.tgid, signal.SIGCONT)
            cgroups.thaw(one.cgroup)

    def _judge_untouchable(self, outcome: Outcome) -> None:
        """None was sent a signal, stopped or frozen since the last act."""
        for one in self.workloads.untouchable:
            now = self.signals.of(one.tgid)
            if now != self._touched.get(one.name, {}):
                outcome.breaks("wrong_process_touched", f"{one.name} {now}")
            self._touched[one.name] = now
            if one.standing() is not None or _frozen_us(one.cgroup):
                outcome.breaks("wrong_process_touched", f"{one.name} {one.standing()}")

    def _judge_ended(self, outcome: Outcome) -> None:
        for one in (*self.workloads.offline, *self.workloads.untouchable):
            if one.has_ended():
                outcome.breaks("workloads_ended", one.name)

    def left_at_end(self, before: Traces) -> dict[str, int]:
        """Ends the last agent; what is left of all of them then, by invariant."""
        codes = self.agents.end()
        poll(lambda: not self.agents.recovering(), _GONE_WITHIN_SECONDS)
        progress = {one.name: one.progress() for one in self.workloads.slow}
        idle = [one for one in self.workloads.slow if not self._works_again(one, progress[one.name])]
        mine = self.stage.path.strip("/")
        poll(lambda: not any(Traces.now().beyond(before, mine).values()), _GONE_WITHIN_SECONDS, 0.2)
        left = Traces.now().beyond(before, mine)
        standing = list(look(self.workloads.offline, _QUICK).values())
        on_gpu = [*self.workloads.offline, *self.workloads.untouchable[:2]]
        return {
            **left,
            "left_probes": left["left_probes"] + sum(changed_code_bytes(one.tgid, _LIBRARY) for one in on_gpu),
            "left_stopped": standing.count(Standing.STOPPED),
            "left_frozen": standing.count(Standing.FROZEN),
            "left_locked": sum(_standing_of(one) is Standing.LOCKED for one in idle),
            "left_limited": sum(_standing_of(one) is Standing.LIMITED for one in idle),
            "left_processes": len(self.agents.recovering()) + sum(code != 0 for code in codes),
            "ledger_entries_left": len(ledger.read(self.agents.ledger)),
        }

    def _works_again(self, one: Watched, before: int) -> bool:
        return bool(poll(lambda: one.progress() > before + 1, _WORKS_WITHIN_SECONDS))


def _standing_of(idle: Watched) -> Standing:
    """Why one that is neither stopped nor frozen does not work."""
    return Standing.LIMITED if idle.role == "denied" else Standing.LOCKED


def _frozen_us(cgroup: str) -> int:
    """How long a cgroup of version 2 was frozen so far, where the kernel says (Linux 6.18)."""
    for folder in cgroups.folders(cgroup) if cgroup else ():
        with suppress(OSError):
            words = (folder / "cgroup.stat.local").read_text().split()
            return int(dict(zip(words[::2], words[1::2], strict=True)).get("frozen_usec", 0))
    return 0


def run_release(run_dir: Path, environment: dict[str, str]) -> None:
    """`gpuwarden release`."""
    command = [sys.executable, "-m", "gpuwarden", "release", "--run-dir", str(run_dir)]
    subprocess.run(command, cwd=_ROOT, env={**os.environ, **environment}, capture_output=True, check=False)


def storm(folder: Path, acts: Iterable[Act], say: Callable[[Outcome], None]) -> tuple[list[Outcome], dict[str, int]]:
    """All acts, one after another; what each came to, and what was left at the end."""
    with ExitStack() as stack:
        node = stack.enter_context(simulated_node(folder / "gpu"))
        stage = stack.enter_context(open_stage(node, folder, Cpus()))
        stack.enter_context(agents.run_directory(folder / "run"))
        signals = stack.enter_context(SignalCounts())
        bystander = stack.enter_context(subprocess.Popen(["sleep", "infinity"]))
        stack.callback(bystander.kill)
        workloads = start_all(stage, bystander)
        stack.callback(workloads.close)
        before = Traces.now()
        found = Storm(stage, workloads, Agents(folder, stage.path, node.environment), signals)
        stack.callback(found.agents.end)
        outcomes = []
        for act in acts:
            outcomes.append(found.perform(act))
            say(outcomes[-1])
        return outcomes, found.left_at_end(before)
