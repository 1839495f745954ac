# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The commands, and the one place that knows both halves: observing (agent) and enforcing (enforce)."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agent import doors, endpoint, logs
from agent.clock import NS_PER_SECOND
from agent.errors import SetupError, UsageError, WardenError, exit_codes
from agent.names import printable
from agent.stacks.arguments import add_arguments as stacks_arguments
from agent.usage.report import add_arguments, report
from agent.usage.tables import DAYS, DEFAULT_FILE

if TYPE_CHECKING:
    from agent.exporters.families import Row
    from agent.model import ContainerKey, Snapshot
    from agent.observer import Settings
    from agent.page.content import Told
    from agent.web import Server
    from agent.webconfig.guard import Guard
    from enforce.explain.history import History
    from enforce.explain.text import Block
    from enforce.policy.file import PolicyFile
    from enforce.policy.model import Policy

_log = logging.getLogger("gpuwarden")
DEFAULT_POLICY = Path("/etc/gpuwarden/policy.yaml")
DEFAULT_RUN_DIR = doors.RUN_DIR
DEFAULT_LISTEN = "127.0.0.1:9837"
_LOOK_SECONDS = 2.5  # two ticks: rates need both, and names are asked for in between


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`gpuwarden`."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.act is not _demo:  # the demo reads its own options
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    logs.configure(logs.Format(options.log_format), logging.DEBUG if options.verbose else logging.INFO)
    _end(parser.prog, lambda: options.act(options))


def gputop(arguments: Sequence[str] | None = None) -> NoReturn:
    """`gputop`."""
    parser = _top_parser()
    options = parser.parse_args(arguments)
    logs.plain(parser.prog, logging.ERROR)
    _end(parser.prog, lambda: _gputop(options))


def parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """gpuwarden's and gputop's: the man pages and the shells' completions are made from them."""
    return _parser(), _top_parser()


def _end(program: str, act: Callable[[], int]) -> NoReturn:
    try:
        code = act()
    except WardenError as error:
        logs.say(f"{program}: {error}", logging.ERROR)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


_NAMES_HELP = "also ask this socket for containers' names; KIND: docker, podman, cri, containerd, kubelet"
_LIBCUDA_HELP = "also watch this libcuda.so.1 (the node's own and containers' copies are found without)"


def _top_parser() -> argparse.ArgumentParser:
    from agent.tui.arguments import add_arguments as gputop_arguments

    parser = argparse.ArgumentParser(
        prog="gputop",
        description="Who uses which GPU, by container, process or device. Live on a terminal, where h lists the keys.",
        epilog=exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--libcuda", action="append", default=[], metavar="FILE", help=_LIBCUDA_HELP)
    parser.add_argument("--socket", type=Path, help=doors.HELP)
    gputop_arguments(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuwarden",
        description="Shows who uses the GPUs, and keeps the latency promises of the online containers.",
        epilog=exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(log_format=logs.Format.AUTO)
    parser.add_argument("--version", action="version", version=f"gpuwarden {version('gpuwarden')}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log everything")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="the agent: observe, serve metrics, and enforce where the policy says so")
    _watching_arguments(run)
    _run_arguments(run)
    run.set_defaults(act=_run)
    plan = commands.add_parser("plan", help="what the policy would do now, without doing it")
    _watching_arguments(plan)
    plan.add_argument("--json", action="store_true", help="a line of JSON per container instead of a table")
    plan.add_argument("--seconds", type=float, default=5.0, help="how long to watch first (%(default)s)")
    plan.set_defaults(act=_plan)
    explaining = commands.add_parser("explain", help="why a container was slowed, when, how much and for whom")
    _explain_arguments(explaining)
    explaining.set_defaults(act=_explain)
    reporting = commands.add_parser("report", help="who used how much, hour by hour, out of the usage ledger")
    add_arguments(reporting)
    reporting.set_defaults(act=_report)
    check = commands.add_parser("check", help="say whether a policy file is right, and what is wrong with it")
    check.add_argument("policy", type=Path, nargs="?", metavar="POLICY", help="the file")
    check.add_argument("--web-config", type=Path, metavar="FILE", help="look at a web configuration instead")
    check.add_argument("--live", action="store_true", help="also compare it with what runs now, and name idle rules")
    check.add_argument("--json", action="store_true", help="mistakes and warnings for programs; see docs/policy.md")
    check.add_argument("--socket", type=Path, help=doors.HELP)
    check.set_defaults(act=_check)
    policy = commands.add_parser("policy", help="write a first policy from what runs now; its schema for editors")
    _policy_arguments(policy)
    policy.set_defaults(act=_policy_command)
    reload = commands.add_parser("reload", help="have the running agent read its policy anew, and say what came of it")
    reload.add_argument("--socket", type=Path, default=endpoint.PATH, help="the one that takes orders (%(default)s)")
    reload.set_defaults(act=_reload)
    release = commands.add_parser("release", help="undo whatever a dead agent left in force")
    release.add_argument("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help=_RUN_DIR_HELP)
    release.add_argument("--stand-by", action="store_true", help=_STAND_BY_HELP)
    release.set_defaults(act=_release)
    doctor = commands.add_parser("doctor", help="what works on this machine, what does not, and what to do about it")
    doctor.add_argument("--libcuda", action="append", default=[], metavar="FILE", help=_LIBCUDA_HELP)
    doctor.set_defaults(act=_doctor)
    stacks = commands.add_parser("stacks", help="which code of a container launches or holds memory: a flame graph")
    stacks_arguments(stacks)
    stacks.set_defaults(act=_stacks)
    demo = commands.add_parser("demo", help="the main job on a simulated GPU, in under three minutes", add_help=False)
    demo.set_defaults(act=_demo)
    return parser


_STAND_BY_HELP = "stay, and do it whenever an agent and its guardian are gone, until SIGTERM"
_RUN_DIR_HELP = "where the sockets and the ledger are (%(default)s)"


def _watching_arguments(parser: argparse.ArgumentParser) -> None:
    """What is watched, and by which policy: for all who decide, whether they act or not."""
    parser.add_argument(
        "--policy", type=Path, help=f"the policy file ({DEFAULT_POLICY} if it exists, else observe only)"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between observations (%(default)s)"
    )
    parser.add_argument("--libcuda", action="append", default=[], metavar="FILE", help=_LIBCUDA_HELP)
    parser.add_argument("--names", action="append", default=[], metavar="KIND=SOCKET", help=_NAMES_HELP)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="ADDRESS:PORT",
        help="for /metrics and the status page (%(default)s)",
    )
    parser.add_argument(
        "--web-config",
        type=Path,
        metavar="FILE",
        help="TLS and passwords for them, as in Prometheus' exporter-toolkit (clear text for everybody)",
    )
    parser.add_argument("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help=_RUN_DIR_HELP)
    parser.add_argument(
        "--usage", default=str(DEFAULT_FILE), metavar="FILE", help="the usage ledger, or off (%(default)s)"
    )
    parser.add_argument("--usage-days", type=int, default=DAYS, metavar="N", help="how long it keeps (%(default)s)")
    parser.add_argument(
        "--log-format",
        choices=list(logs.Format),
        default=logs.Format.AUTO,
        help="of stderr: text for people, a line of JSON each for machines; auto is JSON under systemd (%(default)s)",
    )
    parser.add_argument(
        "--decisions", default="-", metavar="FILE", help="where decisions are written, a line of JSON each (stdout)"
    )


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    from enforce.explain.arguments import add_arguments as explain_arguments

    explain_arguments(parser, DEFAULT_RUN_DIR)


def _policy_arguments(parser: argparse.ArgumentParser) -> None:
    from enforce.init.arguments import add_arguments as init_arguments

    init_arguments(parser, DEFAULT_POLICY)


def _run(options: argparse.Namespace) -> int:
    from agent import capabilities, preflight, web
    from agent.exporters import prometheus
    from agent.health import Health
    from agent.notify import Notifier
    from agent.observer import Observer
    from agent.page.ring import Ring
    from agent.page.site import Site
    from agent.usage.ledger import keep
    from enforce.explain.command import WORD, answer
    from enforce.explain.history import History
    from enforce.reloading import LOOK_SECONDS, Asked, Reloading
    from enforce.start import Enforcement
    from enforce.sysmonitor import SysMonitor

    preflight.require_this_machine()
    for one in preflight.lacking_here():
        _log.warning("%s", capabilities.line(one))
    if not preflight.has_the_nodes_pids():
        _log.warning("%s", preflight.OTHER_PIDS)
    notifier = Notifier.of(os.environ)
    received = _signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    faulthandler.register(signal.SIGUSR1)  # where every thread is, on stderr
    faulthandler.enable()  # the same when a watchdog ends the agent (SIGABRT)
    file, policy = _policy(options.policy)
    address, port = _address(options.listen)
    guard, web_rows = _guard(options.web_config)
    with ExitStack() as stack:
        stack.callback(notifier.close)
        settings = _settings(options)
        observer, history, health = Observer(settings), History(), SysMonitor()
        ring = Ring()
        notifier.decided_ns = observer.decided_ns
        observer.on_tick += [ring.note, notifier.tick]
        site = Site(observer.snapshot, ring, lambda: _decided(history))
        metrics = prometheus.application(observer.snapshot, observer.served, web_rows)
        probes = Health(observer.snapshot, observer.decided_ns, settings.interval_ns).routes()
        routes = {"/metrics": metrics, **site.routes()}
        server = web.serve(address, port, routes, probes, guard)  # first what is refused for little
        stack.callback(server.close)
        _warn_of_everybody(server)
        answers = {WORD: lambda container: answer(history, container)}
        asked = Asked(lambda: os.kill(os.getpid(), signal.SIGHUP))
        sockets = doors.doors(options.run_dir, answers, {"reload": asked.order}, doors.readers())
        stack.callback(endpoint.Endpoint(observer.snapshot, sockets).close)
        keep(observer, options.usage, options.usage_days, stack)
        stack.enter_context(observer)
        places = ", ".join(str(door.path) for door in sockets)
        _log.info("metrics on %s/metrics, the status page on /, snapshots on %s", server.url, places)
        start = partial(
            Enforcement,
            observer=observer,
            run_dir=options.run_dir,
            decisions=options.decisions,
            history=history,
            health=health,
        )
        policies = stack.enter_context(Reloading(file, policy, observer.pipeline, start))
        logs.say("ready")
        notifier.ready(settings.interval_ns)
        while (number := received(LOOK_SECONDS)) in (None, signal.SIGHUP):
            if number is None:
                policies.look()
            else:
                with notifier.reloading():
                    asked.carry_out(policies.reload)
        notifier.stopping()
        _log.info("ending: releasing everything")
    return 0


def _guard(path: Path | None) -> tuple[Guard, Callable[[], Iterable[Row]]]:
    """Who lets in, and what it has to say in the metrics."""
    from agent.webconfig.file import WebConfigFile
    from agent.webconfig.guard import Guard

    if path is None:
        return Guard(), tuple
    file = WebConfigFile(path)
    guard = Guard(file.terms)
    return guard, lambda: (*file.rows(), *guard.rows())


def _warn_of_everybody(server: Server) -> None:
    if not server.on_loopback and not server.guard.terms().ask_who:
        told = "%s is served to whoever can reach it: names of containers, pods and images; --web-config asks who it is"
        _log.warning(told, server.url)


def _decided(history: History) -> Sequence[Told]:
    from enforce.explain.recent import recent  # what only the status page's readers need

    return recent(history)


def _signals(*numbers: signal.Signals) -> Callable[[float], int | None]:
    """What waits so many seconds for a signal, and says which; several SIGHUPs are one, and any other counts more.

    Through a pipe: the kernel may hand a signal to any thread, and a main thread that waits for a lock sleeps on.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)

    def received(seconds: float) -> int | None:
        ready, _, _ = select.select([read], [], [], seconds)
        came = os.read(read, 64) if ready else b""
        return max(came, key=lambda number: number != signal.SIGHUP, default=None)

    return received


def _plan(options: argparse.Namespace) -> int:
    from agent.observer import Observer
    from enforce.plan import plan
    from enforce.toolbox import Toolbox

    if not 0.1 <= options.seconds <= 3600:
        raise UsageError(f"--seconds {options.seconds}: give seconds between 0.1 and 3600")
    _, policy = _policy(options.policy)
    if policy is None:
        raise UsageError(f"no policy to plan with: give --policy FILE, or write {DEFAULT_POLICY}")
    with Observer(_settings(options)) as observer:
        return plan(policy, observer, Toolbox.of(observer, None), options.seconds, options.json, sys.stdout)


def _explain(options: argparse.Namespace) -> int:
    from enforce.explain.command import explain

    return explain(options, sys.stdout)


def _check(options: argparse.Namespace) -> int:
    from agent.webconfig.check import check as check_web
    from enforce.check import check

    if (options.policy is None) is (options.web_config is None):
        raise UsageError("nothing to check, or too much: write check POLICY, or check --web-config FILE")
    if options.web_config is not None:
        return check_web(options.web_config, options.json, sys.stdout)
    socket = options.socket or doors.place()
    return check(options.policy, options.json, _running(socket) if options.live else None, sys.stdout)


def _policy_command(options: argparse.Namespace) -> int:
    from enforce.init.command import Here, init
    from enforce.policy import json_schema

    if options.word == "schema":
        sys.stdout.write(json_schema.page())
        return 0
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    socket = options.socket or doors.place()
    here = Here(input if asks else None, sys.stdout, lambda: _running(socket), lambda: endpoint.fetch(socket))
    return init(options, here)


def _reload(options: argparse.Namespace) -> int:
    from enforce.reloading import Outcome

    line = endpoint.ask(options.socket, "reload", timeout=endpoint.ORDER_SECONDS)
    if line is None:
        raise SetupError(f"no agent answers at {options.socket}: start one, or name its socket with --socket")
    outcome = Outcome(**json.loads(line))
    print(outcome.text)
    return outcome.exit_code


def _release(options: argparse.Namespace) -> int:
    from enforce import ledger
    from enforce.outcome import Outcome
    from enforce.release import release_all

    if options.stand_by:
        return _stand_by(options.run_dir)
    path = options.run_dir / "ledger.jsonl"
    if (why := ledger.unreadable(path)) is not None:
        raise ledger.LedgerError(f"nothing is undone, though something may be in force: {path} {why}")
    released = release_all(path)
    for one in released:
        what = one.entry.place if one.entry.process is None else f"process {one.entry.process.tgid}"
        print(printable(f"{one.entry.container}: {one.entry.act}: {what}: {one.outcome} {one.error or ''}"))
    resumed = sum(one.outcome is Outcome.RESUMED for one in released)
    print(f"{resumed} processes resumed, {len(released)} entries looked at")
    return 0 if all(one.closed for one in released) else 1


def _stand_by(run_dir: Path) -> int:
    from enforce.stand_by import LOOK_SECONDS, StandBy

    received = _signals(signal.SIGTERM, signal.SIGINT)
    stand_by = StandBy(run_dir)
    stand_by.look()
    logs.say("standing by")
    while (number := received(LOOK_SECONDS)) is None:
        stand_by.look()
    return 0 if stand_by.finish(received if number == signal.SIGTERM else None) else 1


def _report(options: argparse.Namespace) -> int:
    return report(options, datetime.now().astimezone(), sys.stdout)


def _doctor(options: argparse.Namespace) -> int:
    from agent.doctor import examine

    return examine(options.libcuda, sys.stdout)


def _stacks(options: argparse.Namespace) -> int:
    from agent.stacks.command import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    # A checkout has it beside this package; the .deb of that name keeps it off every other path.
    sys.path += [str(Path(__file__).resolve().parent.parent), "/usr/lib/gpuwarden-sim"]
    try:
        demo = importlib.import_module("sim.demo")
    except ImportError as error:
        raise SetupError(
            f"the demo needs the simulated GPU: run it in a checkout, or install gpuwarden-sim ({error})"
        ) from error
    return int(demo.main(options.rest))


def _gputop(options: argparse.Namespace) -> int:
    from agent.tui import top

    if options.replay:
        return top.replay(options)
    socket = options.socket or doors.place()
    if endpoint.fetch(socket) is not None:
        return top.run(options, lambda: endpoint.fetch(socket), partial(_decisions, socket))
    from agent.observer import Observer, Settings

    settings = Settings(int(options.interval * NS_PER_SECOND), tuple(options.libcuda))
    with ExitStack() as stack:
        try:
            observer = stack.enter_context(Observer(settings))
        except SetupError as error:
            raise SetupError(f"no agent answers at {socket}, and without one: {error}") from error
        return top.run(options, observer.snapshot, alone=True)


def _decisions(socket: Path, key: ContainerKey) -> Sequence[Block]:
    """What the running agent decided about a container, for gputop."""
    from enforce.explain.command import latest

    return latest(socket, key)


def _running(socket: Path) -> Snapshot:
    """What runs now, as the agent knows it; observed for two seconds where none answers."""
    from agent.observer import Observer, Settings

    snapshot = endpoint.fetch(socket)
    if snapshot is None:
        logging.getLogger().setLevel(logging.WARNING)  # what is attached where is not what was asked for
        with Observer(Settings()) as observer:
            time.sleep(_LOOK_SECONDS)
            snapshot = observer.snapshot()
    if snapshot is None:
        raise SetupError("nothing was observed: see `gpuwarden doctor`")
    return snapshot


def _settings(options: argparse.Namespace) -> Settings:
    from agent.observer import Settings

    if not 0.1 <= options.interval <= 3600:
        raise UsageError(f"--interval {options.interval}: give seconds between 0.1 and 3600")
    return Settings(int(options.interval * NS_PER_SECOND), tuple(options.libcuda), tuple(options.names))


def _policy(path: Path | None) -> tuple[PolicyFile, Policy | None]:
    """Where it is, and what it says now; None where none was named and there is none."""
    from enforce.policy.file import PolicyFile

    file = PolicyFile(path or DEFAULT_POLICY)
    return file, file.load() if path is not None or file.exists() else None


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen {listen}: write ADDRESS:PORT, such as {DEFAULT_LISTEN}")
    return host.strip("[]") or "127.0.0.1", int(port)
