# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The web configuration's file over time: the access rules in force, and their replacement once it has changed.

The file and the certificates that it names are looked at with `stat` at each connection. Invariant: a file that is
wrong, gone or still being written changes nothing that is in force; the log and a metric say so until it is right.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from agent.config.validation import Checked, WatchedFile, older_than_a_second, read_text
from agent.config.yaml_source import Problem, Source
from agent.core.errors import WebConfigError
from agent.exporters.web.auth import AccessRules, Passwords
from agent.exporters.web.schema import FORMAT, WebSection, entries
from agent.exporters.web.tls import TlsBuilder

_log = logging.getLogger(__name__)


def check_file(path: Path) -> Checked[AccessRules]:
    """The access rules of the file and of those that it names, or what is wrong with them. Never raises."""
    read = read_text(path, strict=True)
    unfit: Checked[AccessRules] = Checked(str(path), WebConfigError, files=(path,), was_read=read.was_read)
    if read.problem is not None:
        return replace(unfit, problems=(read.problem,))
    section, source, problems = FORMAT.parse(read.text)
    if section is None:
        return replace(unfit, problems=tuple(sorted(problems)))
    return _rules(section, source, problems, path)


def _rules(section: WebSection, source: Source, problems: list[Problem], path: Path) -> Checked[AccessRules]:
    problems += entries(section, source)
    context, sans, was_read = None, None, True
    files: tuple[Path, ...] = (path,)
    if section.tls_server_config is not None:
        tls = TlsBuilder(section.tls_server_config, path.parent)
        context, sans = tls.context(), tls.sans()
        files, was_read = (path, *tls.files), not tls.unread
        for key, text in tls.problems.items():
            where = ("tls_server_config", key)
            problems.append(Problem(source.key_place(where), f"{FORMAT.label(where)} {text}"))
    rules = None
    if not problems:
        users = section.basic_auth_users
        headers = tuple((name, value) for name, value in section.http_server_config.headers.items() if value)
        rules = AccessRules(context, sans, Passwords(users) if users else None, headers)
    return Checked(str(path), WebConfigError, tuple(sorted(problems)), rules, files=files, was_read=was_read)


class WebConfigFile:
    """One path, and the access rules in force. Raises WebConfigError where the file is wrong at the start.

    `reloaded_wall`: when the rules in force were read, in seconds; `error`: why the present file is not in force.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._file = WatchedFile(path, check_file, older_than_a_second)
        self.error: WebConfigError | None = None
        self._rules = self._file.load()
        self.reloaded_wall = time.time()

    def terms(self) -> AccessRules:
        """Those in force now. For any thread."""
        with self._mutex:
            if self._file.changed():
                self._reload()
            return self._rules

    def rows(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """For the metrics."""
        yield "gpuwarden_web_config_reload_success", (), self.error is None
        yield "gpuwarden_web_config_reload_timestamp_seconds", (), self.reloaded_wall

    def _reload(self) -> None:
        before = str(self.error)
        try:
            self._rules = self._file.load()
        except WebConfigError as error:
            self.error = error
            if str(error) != before:  # a file that cannot be read is tried at each connection
                _log.error("web configuration not reloaded, the old one stays in force: %s", error)
            return
        self.error, self.reloaded_wall = None, time.time()
        _log.info("web configuration reloaded: %s", self._rules)
