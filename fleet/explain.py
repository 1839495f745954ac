# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet explain POD`: why a pod is where it is, why not elsewhere, why it waits.

`explanation` is what the service answers, `act` asks it. It is worked out from the present plan; so of a pod that is
placed it says what was expected of it then, as written on the pod.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from fleet.deadlines import fetch
from fleet.extender.answers import Filtered
from fleet.extender.bind import PLAN
from fleet.extender.protocol import Question, View, filtered
from fleet.extender.reservations import THROUGHPUT, Reservation, holder
from fleet.model import FleetError, printable

SERVICE: Final = "http://127.0.0.1:9838"
_TIMEOUT_S: Final = 10.0
_LONGEST_ANSWER: Final = 16 << 20
_EXAMPLES: Final = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden fleet explain`."""
    parser.add_argument("pod", metavar="POD", help="NAMESPACE/NAME, or a name in the namespace default")
    parser.add_argument("--service", default=SERVICE, metavar="URL", help="of `gpuwarden fleet serve` (%(default)s)")
    parser.add_argument("--json", action="store_true", help="write one JSON document")


def act(options: argparse.Namespace) -> int:
    """Exit code: 0, also of a pod that waits."""
    key = options.pod if "/" in options.pod else f"default/{options.pod}"
    found = ask(options.service, key)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(printable(line) for line in lines(found)))
    return 0


def ask(service: str, key: str) -> Mapping[str, Any]:
    """The service's explanation."""
    address = f"{service.rstrip('/')}/v1/explain?{urllib.parse.urlencode({'pod': key})}"
    try:
        found = json.loads(fetch(address, _TIMEOUT_S, _LONGEST_ANSWER))
    except urllib.error.HTTPError as error:
        raise FleetError(_said(error)) from error
    except (OSError, ValueError) as error:
        raise FleetError(
            f"the service at {service} does not answer: {error}; is it running, and forwarded as with "
            "`kubectl port-forward deployment/NAME-fleet 9838`?",
            3,
        ) from error
    if not isinstance(found, dict):
        raise FleetError(f"{service} gives no explanation: is it `gpuwarden fleet serve`?", 3)
    return found


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(10_000))["Error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error)


def explanation(view: View, key: str, pods: Mapping[str, Any]) -> dict[str, Any]:
    """Of one pod. `pods`: UID → document."""
    uid, pod = next(
        ((uid, pod) for uid, pod in pods.items() if (seen := holder(pod)) is not None and seen.key == key), ("", None)
    )
    if pod is None:
        raise FleetError(f"no pod {key} whose schedulerName is gpuwarden: is the namespace right?")
    seen, mine = holder(pod), view.reservations.by_pod.get(uid)
    if seen is not None and seen.finished:
        return {"pod": key, "state": "finished"}
    if mine is not None:
        return _placed(key, mine, pod)
    if seen is not None and seen.node is not None:
        return {"pod": key, "state": "bound", "node": seen.node, "gpu": None}
    return {"pod": key, "state": "waiting", **_waits(view, pod)}


def _placed(key: str, mine: Reservation, pod: Any) -> dict[str, Any]:
    annotations = pod["metadata"].get("annotations") or {}
    return {
        "pod": key,
        "state": "bound" if mine.bound else "reserved",
        "node": mine.node,
        "gpu": mine.gpu,
        "expected_throughput": annotations.get(THROUGHPUT),
        "plan": annotations.get(PLAN),
    }


def _waits(view: View, pod: Any) -> dict[str, Any]:
    nodes = tuple(view.board.by_node) if view.board is not None else ()
    found = filtered(view, Question(pod, nodes))
    if not isinstance(found, Filtered):
        return {"why": found, "nodes": [], "refused": []}
    counts = Counter(found.refused.values())
    refused = [
        {
            "reason": reason,
            "nodes": count,
            "such_as": [n for n, why in found.refused.items() if why == reason][:_EXAMPLES],
        }
        for reason, count in counts.most_common(20)
    ]
    why = (
        "the plan has a GPU for it: the scheduler has not asked yet, or has reasons of its own" if found.nodes else None
    )
    return {"why": why or "no node has a GPU for it", "nodes": list(found.nodes), "refused": refused}


def lines(found: Mapping[str, Any]) -> list[str]:
    """For people."""
    state = found.get("state")
    if state in ("bound", "reserved"):
        expected = found.get("expected_throughput")
        words = f"{found['pod']} is {state}: {found.get('gpu') or 'no GPU of ours'} on {found.get('node') or 'a node'}"
        return [words, *([f"expected throughput: {expected} of alone"] if expected else [])]
    if state != "waiting":
        return [f"{found.get('pod')} is {state}"]
    text = [f"{found['pod']} waits: {found.get('why')}"]
    if nodes := found.get("nodes"):
        more = f" and {len(nodes) - _EXAMPLES} more" if len(nodes) > _EXAMPLES else ""
        text.append(f"could go to: {', '.join(nodes[:_EXAMPLES])}{more}")
    rows = found.get("refused", ())
    text += [f"{row['nodes']} × {row['reason']}, such as {', '.join(row['such_as'])}" for row in rows]
    return text + [
        f"GPUs without room: {count} × {reason}" for reason, count in sorted(found.get("no_slots", {}).items())
    ]
