# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden reload`: the running agent reads its policy again, and the outcome is printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from agent.core.errors import SetupError
from agent.exporters.api.client import PATH, RELOAD, ask
from enforce.reload import ReloadOutcome, ReloadRequests

if TYPE_CHECKING:
    from agent.exporters.web.handler import Order, Reply

TIMEOUT_SECONDS = 310.0  # the agent gives up after 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden reload`."""
    parser.add_argument("--socket", type=Path, default=PATH, help="control socket of the agent (%(default)s)")


def act(options: argparse.Namespace) -> int:
    """The outcome's exit code. SetupError: no agent answers."""
    accepted = (HTTPStatus.OK, HTTPStatus.UNPROCESSABLE_ENTITY)
    response = ask(options.socket, RELOAD, method="POST", timeout=TIMEOUT_SECONDS, accepted=accepted)
    if response is None:
        raise SetupError(f"no agent answers at {options.socket}: start one, or name its socket with --socket")
    outcome = ReloadOutcome(**json.loads(response.body))
    print(outcome.text)
    return outcome.exit_code


def order(requests: ReloadRequests) -> Order:
    """POST /v1/reload in the agent: 200 when the policy is in force, else 422; the outcome as JSON."""
    from agent.exporters.api.routes import json_answer

    def reload(reply: Reply) -> None:
        requests.order(lambda outcome: reply(json_answer(json.dumps(asdict(outcome)), _status(outcome))))

    return reload


def _status(outcome: ReloadOutcome) -> HTTPStatus:
    return HTTPStatus.OK if outcome.exit_code == 0 else HTTPStatus.UNPROCESSABLE_ENTITY
