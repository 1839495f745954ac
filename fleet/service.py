# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet serve`: the plan, carried out through a kube-scheduler that runs unmodified beside it.

Invariant: what it decided is in the API server before it counts; a service that is killed at any moment and started
again goes on from there, and gives no GPU twice. Run one at a time: two of them know of each other only what both have
written. Threads: one follows the pods, one plans (in a process of its own), one releases, one writes notices, and one
per connection answers.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from fleet.explain import explanation
from fleet.exporter import Metrics
from fleet.extender.bind import Binder, Bound, Delivery, Outcome
from fleet.extender.notices import Notices
from fleet.extender.protocol import (
    BindRequest,
    bind_request,
    bind_result,
    filter_result,
    prioritize_result,
    question,
)
from fleet.extender.reservations import holder
from fleet.extender.server import Page, Routes, Server, json_page
from fleet.extender.state import State
from fleet.model import FleetError
from fleet.plan import add_prediction_arguments, at_least, document, given, given_settings, given_table
from fleet.planner import Inputs, Planner
from fleet.solver import Source
from fleet.sources.kubernetes import KubernetesApi, access
from fleet.sources.pods import seconds, waiting
from fleet.sources.watch import follow

_OLDEST_PLAN_INTERVALS: Final = 3.0
_LEAST_INTERVAL_S: Final = 1.0
_LEAST_LEARN_S: Final = 10.0
"""Prometheus' rates need samples of twice its scrape interval"""
_RELEASE_EACH_S: Final = 1.0
_SWITCH_S: Final = 0.0005
"""Python's threads take turns: none keeps a request waiting for 5 ms at each turn"""

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden fleet serve`."""
    add = parser.add_argument
    add("--prometheus", required=True, metavar="URL", help="server that scrapes the agents, such as http://host:9090")
    add("--kubernetes", metavar="URL", help="such as kubectl proxy's; default: the API server of the pod's own cluster")
    add("--listen", default="127.0.0.1:9838", metavar="ADDRESS:PORT", help="for the scheduler (default: %(default)s)")
    add(
        "--pages",
        metavar="ADDRESS:PORT",
        help="pages there too, for Prometheus and the kubelet: nothing can be bound there",
    )
    add("--interval", default="60s", metavar="TIME", help="between plans (default: %(default)s)")
    add(
        "--delivery",
        choices=[one.value for one in Delivery],
        default=Delivery.GPUWARDEN.value,
        help="hami: write the GPU in HAMi's annotation too",
    )
    add(
        "--learn-over",
        default="600s",
        metavar="TIME",
        help="of one measurement of a pair by the agents' counters, for the predictors table and learned (%(default)s)",
    )
    add_prediction_arguments(parser)


def act(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Exit code 0 then."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(_SWITCH_S)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service = Service(_configured(options), stop)
    try:
        print(f"gpuwarden fleet: serves on {service.url}", file=sys.stderr, flush=True)
        stop.wait()
    finally:
        service.close()
    return 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """Of a service."""

    api: KubernetesApi
    inputs: Inputs
    address: tuple[str, int]
    """For the scheduler"""
    pages: tuple[str, int] | None = None
    """For whom nothing can be bound"""
    delivery: Delivery = Delivery.GPUWARDEN


def _configured(options: argparse.Namespace) -> Configuration:
    read = given_table(options)
    for reason, count in read.dropped.items():
        _log.warning("table of pairs: %d rows dropped: %s", count, reason)
    learn_over_s = at_least(given(seconds(options.learn_over), "--learn-over", "600s"), _LEAST_LEARN_S, "--learn-over")
    source = Source(options.prometheus, given_settings(options), options.predictor, read.table, learn_over_s)
    interval_s = at_least(given(seconds(options.interval), "--interval", "60s"), _LEAST_INTERVAL_S, "--interval")
    api = KubernetesApi(access(options.kubernetes))
    return Configuration(
        api,
        Inputs(source, interval_s),
        _address(options.listen, "--listen"),
        None if options.pages is None else _address(options.pages, "--pages"),
        Delivery(options.delivery),
    )


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise FleetError(f"{option} {text}: not understood; write it as 127.0.0.1:9838")
    return host.strip("[]"), int(port)


class Service:
    """Runs from its making until it is closed."""

    def __init__(self, configuration: Configuration, stop: threading.Event) -> None:
        oldest_s = _OLDEST_PLAN_INTERVALS * configuration.inputs.interval_s
        self._stop, self._api = stop, configuration.api
        self.metrics = Metrics()
        self.state = State(time.monotonic, oldest_s)
        self._notices = Notices(configuration.api, self.metrics.dropped)
        self._binder = Binder(configuration.api, self.state, configuration.delivery, self._bound)
        self._planner = Planner(configuration.inputs, self.state, self.metrics, self._notices)
        self._server = Server(configuration.address, self._routes())
        self._pages = None
        if configuration.pages is not None:
            self._pages = Server(configuration.pages, replace(self._routes(), verbs={}))
        api = configuration.api
        loops: dict[str, Callable[[], None]] = {
            "follow": lambda: follow(api, self.state, stop),
            "plan": lambda: self._planner.run(stop),
            "release": self._release,
            "notices": lambda: self._notices.run(stop),
            "serve": lambda: self._server.serve_forever(0.1),
        }
        if (pages := self._pages) is not None:
            loops["pages"] = lambda: pages.serve_forever(0.1)
        for name, loop in loops.items():
            threading.Thread(target=self._guarded, args=(name, loop), name=name, daemon=True).start()

    @property
    def url(self) -> str:
        """For the scheduler."""
        return self._server.url

    @property
    def pages_url(self) -> str | None:
        """For others."""
        return None if self._pages is None else self._pages.url

    def close(self) -> None:
        """Bindings that have begun are ended; what else runs is left to end with the process."""
        self._stop.set()
        self._server.stop()
        if self._pages is not None:
            self._pages.stop()
        self._planner.close()
        self._api.close()

    def _guarded(self, name: str, loop: Callable[[], None]) -> None:
        """A thread that fails unexpectedly ends the service: Kubernetes starts it again."""
        try:
            loop()
        except Exception:  # noqa: BLE001  whatever it was, half a service must not go on
            _log.exception("the thread %s failed", name)
            self.state.trouble(name, f"the service's thread {name} failed: see its log")
            self._stop.set()

    def _release(self) -> None:
        while not self._stop.wait(_RELEASE_EACH_S):
            if count := self._binder.release_expired():
                self.metrics.released(count)

    def _bound(self, asked: BindRequest, found: Bound) -> None:
        waited_s = None
        if found.outcome is Outcome.BOUND and found.decision is not None:
            waited_s = _age_s(self.state.pod(asked.uid), time.time())
            self._notices.placed(asked, found.decision, time.time())
        elif found.error:
            _log.info("%s is not bound to %s: %s", asked.key, asked.node, found.error)
        self.metrics.bind(found.outcome, waited_s)

    def _routes(self) -> Routes:
        verbs: dict[str, Callable[[Any], Any]] = {
            "/filter": self._filter,
            "/prioritize": lambda body: prioritize_result(self.state.view(), question(body)),
            "/bind": lambda body: bind_result(self._binder.bind(bind_request(body))),
        }
        views: dict[str, Callable[[Mapping[str, str]], Page]] = {
            "/metrics": lambda _: Page(self._metrics(), "text/plain; version=0.0.4; charset=utf-8"),
            "/healthz": lambda _: json_page({"status": "serving", "refusal": self.state.view().refusal}),
            "/v1/plan": lambda _: self._plan(),
            "/v1/explain": self._explain,
        }
        return Routes(verbs, views, self.metrics.request)

    def _filter(self, body: Any) -> Any:
        asked = question(body)
        result = filter_result(self.state.view(), asked)
        seen = holder(asked.pod)
        if not result["NodeNames"] and seen is not None:
            self.state.refused(seen.uid)
        return result

    def _plan(self) -> Page:
        last = self._planner.last
        if last is None:
            return json_page({"Error": self.state.view().refusal or "there is no plan yet"}, 503)
        return json_page(document(last))

    def _explain(self, query: Mapping[str, str]) -> Page:
        found = explanation(self.state.view(), query.get("pod", ""), self.state.pods())
        if found["state"] == "waiting" and (last := self._planner.last) is not None:
            found["no_slots"] = dict(last.found.unknown)
        return json_page(found)

    def _metrics(self) -> bytes:
        view, pods = self.state.view(), self.state.pods()
        bound = sum(one.bound for one in view.reservations.by_pod.values())
        free = waiting(pod for uid, pod in pods.items() if uid not in view.reservations.by_pod)
        jobs = {"waiting": len(free.jobs), "reserved": len(view.reservations.by_pod) - bound, "bound": bound}
        first = next((pod for pod in pods.values() if free.jobs and _key(pod) == free.jobs[0].key), None)
        longest_s = _age_s(first, time.time()) or 0.0
        self.metrics.pods(jobs, Counter(free.refused), len(view.reservations.twice()), longest_s)
        return self.metrics.page()


def _key(pod: Any) -> str | None:
    seen = holder(pod)
    return None if seen is None else seen.key


def _age_s(pod: Any, now_s: float) -> float | None:
    created = None if pod is None else pod["metadata"].get("creationTimestamp")
    try:
        return now_s - datetime.fromisoformat(str(created)).timestamp()
    except ValueError:
        return None
