# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Options that several commands share, their defaults, and what they are turned into."""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError, UsageError
from agent.exporters.api.client import RUN_DIR
from agent.probes.return_probes import ReturnProbes

if TYPE_CHECKING:
    from agent.core.model import Snapshot
    from agent.observer import ObserverSettings

DEFAULT_POLICY: Final = Path("/etc/gpuwarden/policy.yaml")
DEFAULT_RUN_DIR: Final = RUN_DIR
LIBCUDA_HELP: Final = "also probe this libcuda.so.1 (those of the node and of containers are found without)"
RUN_DIR_HELP: Final = "directory of the sockets and the ledger (%(default)s)"
_NAMES_HELP = "also look up container names at this socket; KIND: docker, podman, cri, containerd, kubelet"
_RETURNS_HELP = (
    "attach return probes where the kernel lets every sandboxed process pass them (auto), or never (off): "
    "then only launches are counted (%(default)s)"
)
_OBSERVING_SECONDS = 2.5  # two ticks: rates need both, and names are looked up in between


def add_observing_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for what is observed and by which policy, of the commands that decide."""
    add = parser.add_argument
    add("--policy", type=Path, help=f"policy file ({DEFAULT_POLICY} if it exists, else observe only)")
    add("--interval", type=float, default=1.0, metavar="S", help="seconds between observations (%(default)s)")
    add("--libcuda", action="append", default=[], metavar="FILE", help=LIBCUDA_HELP)
    add("--names", action="append", default=[], metavar="KIND=SOCKET", help=_NAMES_HELP)
    add_return_probes(parser)


def add_return_probes(parser: argparse.ArgumentParser) -> None:
    """The option --return-probes, of every command that attaches probes."""
    parser.add_argument(
        "--return-probes",
        type=ReturnProbes,
        choices=list(ReturnProbes),
        default=ReturnProbes.AUTO,
        help=_RETURNS_HELP,
    )


def observer_settings(options: argparse.Namespace) -> ObserverSettings:
    """The settings from `add_observing_arguments`. UsageError: an interval out of range."""
    from agent.observer import ObserverSettings

    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval {options.interval}: give seconds between 0.1 and 3600")
    interval_ns = int(options.interval * NS_PER_SECOND)
    return ObserverSettings(interval_ns, tuple(options.libcuda), tuple(options.names), options.return_probes)


def running(socket: Path) -> Snapshot:
    """A snapshot of what runs now: the agent's, or one of two seconds of observing where no agent answers."""
    from agent.exporters.api.client import fetch
    from agent.observer import Observer, ObserverSettings

    snapshot = fetch(socket)
    if snapshot is None:
        logging.getLogger().setLevel(logging.WARNING)  # not where probes are attached
        with Observer(ObserverSettings()) as observer:
            time.sleep(_OBSERVING_SECONDS)
            snapshot = observer.snapshot()
    if snapshot is None:
        raise SetupError("nothing was observed: see `gpuwarden doctor`")
    return snapshot


def signal_receiver(*numbers: signal.Signals) -> Callable[[float], int | None]:
    """A function that waits for a signal, up to so many seconds. Several SIGHUPs are one; others come first.

    Through a pipe: the kernel may hand a signal to any thread, and a main thread that waits for a lock stays asleep.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)

    def receive(seconds: float) -> int | None:
        ready, _, _ = select.select([read], [], [], seconds)
        received = os.read(read, 64) if ready else b""
        return max(received, key=lambda number: number != signal.SIGHUP, default=None)

    return receive
