# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden run`: the agent. Observes, serves metrics, status page and sockets, and enforces where the policy says
so."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from agent.core import logs
from agent.core.errors import UsageError
from agent.exporters.api import routes as api
from agent.exporters.api.client import readers
from agent.exporters.liveness import Health, Notifier
from agent.exporters.prometheus import collector
from agent.exporters.prometheus.families import Row
from agent.exporters.status_page.content import DecisionRow
from agent.exporters.status_page.history import Ring
from agent.exporters.status_page.routes import Site
from agent.exporters.usage.recorder import keep
from agent.exporters.usage.store import DAYS, DEFAULT_FILE
from agent.exporters.web.auth import Guard
from agent.exporters.web.handler import OwnNames
from agent.exporters.web.server import HttpServer, TcpListener, listen_on_tcp
from agent.node import preflight
from agent.observer import Observer
from agent.probes import kept_state
from enforce.audit.history import DecisionHistory
from enforce.device_health import SysMonitor
from enforce.policy.model import Policy
from enforce.reload import LOOK_SECONDS, PolicyFile, PolicyReloader, ReloadRequests, policy_file
from enforce.service import EnforcementService, EnforcementSettings
from gpuwarden import explain, reload
from gpuwarden.options import (
    DEFAULT_POLICY,
    DEFAULT_RUN_DIR,
    RUN_DIR_HELP,
    add_observing_arguments,
    observer_settings,
    signal_receiver,
)

_log = logging.getLogger("gpuwarden")
DEFAULT_LISTEN = "127.0.0.1:9837"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden run`."""
    add_observing_arguments(parser)
    add = parser.add_argument
    add(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="ADDRESS:PORT",
        help="address of /metrics and the status page (%(default)s)",
    )
    add(
        "--web-config",
        type=Path,
        metavar="FILE",
        help="TLS and passwords for them, in the format of Prometheus' exporter-toolkit (none)",
    )
    add(
        "--web-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name that requests may use, besides addresses, localhost and the machine's own; may be repeated",
    )
    add("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help=RUN_DIR_HELP)
    add("--usage", default=str(DEFAULT_FILE), metavar="FILE", help="usage ledger, or off (%(default)s)")
    add("--usage-days", type=int, default=DAYS, metavar="N", help="days that the usage ledger keeps (%(default)s)")
    add(
        "--log-format",
        choices=list(logs.Format),
        default=logs.Format.AUTO,
        help="format of the log on stderr: text, or JSON lines; auto is JSON under systemd (%(default)s)",
    )
    add("--decisions", default="-", metavar="FILE", help="write decisions to FILE as JSON lines (stdout)")


def act(options: argparse.Namespace) -> int:
    """Until SIGTERM or SIGINT; SIGHUP reads the policy again."""
    _check_machine()
    observing = replace(observer_settings(options), kept=options.run_dir / kept_state.FILE)
    observer, history = Observer(observing), DecisionHistory()
    notifier = Notifier.of(os.environ, observer.decided_ns)
    receive = signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    faulthandler.register(signal.SIGUSR1)  # where every thread is, on stderr
    faulthandler.enable()  # the same when a watchdog ends the agent (SIGABRT)
    file, policy = _policy(options.policy)
    with ExitStack() as stack:
        stack.callback(notifier.close)
        observer.listeners.register(notifier.tick)
        requests = ReloadRequests(lambda: os.kill(os.getpid(), signal.SIGHUP))
        addresses = _serve(options, observer, history, requests, stack)  # first what is refused at little cost
        keep(observer, options.usage, options.usage_days, stack)
        stack.enter_context(observer)
        _log.info("%s", addresses)
        settings = EnforcementSettings(options.run_dir, options.decisions, history, SysMonitor())
        start = partial(EnforcementService, observer=observer, settings=settings)
        policies = stack.enter_context(PolicyReloader(file, policy, observer.pipeline, start))
        _give_memory_back()
        logs.say("ready")
        notifier.ready(observer_settings(options).interval_ns)
        while (number := receive(LOOK_SECONDS)) in (None, signal.SIGHUP):
            if number is None:
                policies.look()
            else:
                with notifier.reloading():
                    requests.carry_out(policies.reload)
        notifier.stopping()
        _log.info("ending: releasing everything")
    return 0


def _check_machine() -> None:
    """SetupError where nothing can be observed; warnings about what else is missing."""
    preflight.require_this_machine()
    for capability in preflight.lacking_here():
        _log.warning("%s", preflight.line(capability))
    if not preflight.has_the_nodes_pids():
        _log.warning("%s", preflight.OTHER_PIDS)


def _give_memory_back() -> None:
    """To the system, what only starting needed: 6 MiB of 65, above all of loading the probes.

    What is left lives as long as the agent, so the garbage collector need not go through it again.
    """
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _policy(path: Path | None) -> tuple[PolicyFile, Policy | None]:
    """Where it is, and what it says now; None where no path was given and the default file does not exist."""
    file = policy_file(path or DEFAULT_POLICY)
    return file, file.load() if path is not None or file.exists() else None


def _serve(
    options: argparse.Namespace,
    observer: Observer,
    history: DecisionHistory,
    requests: ReloadRequests,
    stack: ExitStack,
) -> str:
    """Metrics, health probes and the status page over TCP; the API over UNIX sockets. Where, as one line of the log."""
    port = _listen_on_tcp(options, observer, history)
    stack.callback(port.close)
    offered = api.Api(observer.snapshot, partial(explain.answer, history), reload.order(requests))
    sockets = api.listeners(options.run_dir, offered, readers())
    stack.enter_context(HttpServer([port, *sockets]))
    _warn_of_open_access(port)
    paths = ", ".join(str(socket.path) for socket in sockets)
    return f"metrics on {port.url}/metrics, the status page on /, snapshots on {paths}"


def _listen_on_tcp(options: argparse.Namespace, observer: Observer, history: DecisionHistory) -> TcpListener:
    address, port = _address(options.listen)
    guard, web_rows = _guard(options.web_config)
    ring = Ring()
    observer.listeners.register(ring.note)
    names = OwnNames(options.web_host)
    site = Site(observer.snapshot, ring, lambda: _decided(history), names=names)
    metrics = collector.application(observer.snapshot, observer.served, web_rows)
    probes = Health(observer.snapshot, observer.decided_ns, observer_settings(options).interval_ns).routes()
    return listen_on_tcp(address, port, {"/metrics": names.guarded(metrics), **site.routes()}, probes, guard)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen {listen}: write ADDRESS:PORT, such as {DEFAULT_LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _guard(path: Path | None) -> tuple[Guard, Callable[[], Iterable[Row]]]:
    """Access control of the TCP port, and its metrics."""
    if path is None:
        return Guard(), tuple
    from agent.exporters.web.config import WebConfigFile  # pydantic, 12 MiB, which only those who write such a file pay

    file = WebConfigFile(path)
    guard = Guard(file.terms)
    return guard, lambda: (*file.rows(), *guard.rows())


def _warn_of_open_access(port: TcpListener) -> None:
    if not port.on_loopback and not port.guard.terms().is_restricted:
        text = "%s is served to every client that can reach it: names of containers, pods and images; %s"
        _log.warning(text, port.url, "restrict it with --web-config")


def _decided(history: DecisionHistory) -> Sequence[DecisionRow]:
    from enforce.audit.text import recent  # needed only by readers of the status page

    return recent(history)
