# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's side of guardian and backstop: starts them, and starts them again when they end or hang.

It notices the guardian's death at once, and resumes everything then.

A guardian that hangs renews no lease, so the kernel stops no process any more; it is killed, so that what it left
stopped is resumed as after its death.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from agent.core import logs
from agent.core.clock import monotonic_ns
from agent.core.worker import Worker
from agent.probes.abi import Control
from agent.probes.libcuda import LibcudaProbes
from enforce.actuators.undo import MadeBy, acts_where, release_all, undo_all
from enforce.ledger.run_lock import closed_first
from enforce.policy.model import Tuning
from enforce.recovery.backstop import BackstopSettings, Beats, new_page
from enforce.recovery.guardian import GuardianSettings

_log = logging.getLogger(__name__)
_MAPS = (
    *("pauses", "stops", "holding", "gates", "links", "turns", "controls", "resumes"),
    *("quotas", "quota_uses", "memory"),
)
_RESTART_SECONDS = 1.0
_RESTART_NS = 1_000_000_000
_STARTS_NS = 10_000_000_000  # what a guardian may take to start on a busy machine
_HANGS_NS = 1_000_000_000  # without a lease for so long, while the agent's heart beats


class BackstopKeeper:
    """Keeps one backstop running from `start` to `stop`. For one thread.

    `inherited`: the descriptors that the guardian shares with the agent: the page, and the writing end of the pipe by
    whose end the backstop knows that both are gone.
    """

    def __init__(self, ledger: Path) -> None:
        page = new_page()
        self.beats = Beats.shared(page)
        self._alive, alive_write = os.pipe()
        self.inherited = (page, closed_first(alive_write))
        self._fds: tuple[int, ...] = (self._alive, *self.inherited)
        self._settings = BackstopSettings(page, str(ledger), os.getpid(), logs.in_force())
        self._process: subprocess.Popen[bytes] | None = None
        self._again_ns = 0
        self.restarts = 0

    def start(self) -> None:
        """Starts it. One that cannot be started is started by a later `beat`."""
        self.beats.agent_ns = monotonic_ns()
        self._spawn(self.beats.agent_ns)

    def beat(self, now_ns: int) -> None:
        """Says that the agent runs; starts the backstop again if that is gone, and kills it if it hangs."""
        self.beats.agent_ns = now_ns
        if self._process is None or self._process.poll() is not None:
            if now_ns >= self._again_ns:
                self.restarts += 1
                code = self._process and self._process.returncode
                _log.error("the backstop ended with code %s: starting it again", code)
                self._spawn(now_ns)
        elif now_ns - max(self.beats.backstop_ns, self._again_ns + _STARTS_NS) > _HANGS_NS:
            _log.error("the backstop hangs: killing it")
            self._process.kill()

    def stop(self) -> None:
        """Ends it, and closes what it shared with the guardian: that has ended, and nothing is left to undo.

        Harmless the second time.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    def _spawn(self, now_ns: int) -> None:
        self._again_ns = now_ns + _RESTART_NS
        self._process = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-m", "enforce.recovery.backstop", self._settings.to_argument()],
                stdin=self._alive,
                pass_fds=(self._settings.beats,),
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _log.error("the backstop cannot be started; tried again: %s", error)


class Supervisor:
    """Keeps one guardian running from `start` to `stop`, and one backstop."""

    def __init__(self, probes: LibcudaProbes, ledger: Path, tuning: Tuning, inherited: tuple[int, ...] = ()) -> None:
        fds = {name: probes.bpf.map_fd(name) for name in _MAPS}
        times = (tuning.gate_open_delay_ns, tuning.gate_hold_ns)
        self._backstop = BackstopKeeper(ledger)
        page, _ = self._backstop.inherited
        self._settings = GuardianSettings(fds, str(ledger), os.getpid(), *times, page, logs.in_force())
        # File descriptors that the guardian keeps open until it ends.
        self._inherited = (*inherited, *self._backstop.inherited)
        self._control: Control = probes.map("controls").share(1)[0]
        self._ledger = ledger
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._watch = Worker(
            "guardian-watch", self._step, failed="watching the guardian", retry_seconds=_RESTART_SECONDS
        )
        self.restarts = 0
        self._lease_expected_ns = 0

    def start(self) -> None:
        """Starts the guardian. From now on the kernel may stop processes, while `beat` is called."""
        self._control.agent_tgid = os.getpid()
        self._backstop.start()  # before the kernel may stop a process
        self.beat()
        self._spawn()
        self._watch.start()

    def beat(self) -> None:
        """Says that the agent still decides. Without it for a second, everything is released."""
        now = monotonic_ns()
        if now - self._control.heartbeat_ns > _HANGS_NS:  # the agent hung: the guardian was right to end the lease
            self._lease_expected_ns = now + _HANGS_NS
        self._control.heartbeat_ns = now
        self._backstop.beat(now)
        if now - max(self._control.lease_until_ns, self._lease_expected_ns) > _HANGS_NS:
            self._kill_hanging(now)

    def _kill_hanging(self, now_ns: int) -> None:
        process = self._process
        if process is None or process.returncode is not None or self._watch.stopping:
            return
        self._lease_expected_ns = now_ns + _STARTS_NS
        _log.error("the guardian hangs: killing it")
        process.kill()

    def stop(self) -> None:
        """Ends the guardian, which releases everything first."""
        with self._starting:  # one that is being started now is ended too
            self._watch.stop()
            process = self._process
        if process and process.stdin:
            process.stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._control.lease_until_ns = 0
        release_all(self._ledger)
        self._backstop.stop()

    def losses(self) -> dict[str, int]:
        """How often they had to be started again: for Snapshot.lost."""
        return {"guardian:restarted": self.restarts, "backstop:restarted": self._backstop.restarts}

    def _spawn(self) -> None:
        with self._starting:
            if self._watch.stopping:
                return
            self._lease_expected_ns = monotonic_ns() + _STARTS_NS
            self._process = subprocess.Popen(
                # -I: neither the working directory nor the caller's environment says what runs
                [sys.executable, "-I", "-m", "enforce.recovery.guardian", self._settings.to_argument()],
                stdin=subprocess.PIPE,
                pass_fds=(*self._settings.fds.values(), *self._inherited),
                start_new_session=True,  # a terminal's Ctrl-C is for the agent; the guardian follows it
            )

    def _step(self) -> float | None:
        """Waits for the guardian's end, resumes what it left stopped, and has another one started by the next step.

        Until that works the lease is not renewed, so the kernel stops no process.
        """
        process = self._process
        if process is None:
            return self._restart()
        code = process.wait()
        if self._watch.stopping:
            return None
        self._control.lease_until_ns = 0
        # What the rungs did is theirs to undo; and the kernel's rules stay, so their entries do.
        undone = undo_all(self._ledger, acts=acts_where(MadeBy.KERNEL))
        self._process = None
        self.restarts += 1
        _log.error("the guardian ended with code %s: released %d processes, starting it again", code, len(undone))
        return _RESTART_SECONDS

    def _restart(self) -> float:
        try:
            self._spawn()
        except (OSError, ValueError, subprocess.SubprocessError) as error:  # no memory, processes or descriptors
            _log.error("the guardian cannot be started, no process is stopped meanwhile; tried again: %s", error)
            return _RESTART_SECONDS
        return 0.0
