# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which container a rule is about.

Patterns are shell patterns in which case counts; a tuple of them means any of them; every key that is given must match,
and what is unknown about a container matches nothing, not even `*`. `user` and `command` are about processes: to be
slowed (`every_process`), all of a container's processes must match; to be watched or protected, one is enough. The
pseudo-container of the host is matched only through them: it is everything else that runs on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from agent.model import HOST, Container

Patterns = tuple[str, ...]
_ID_CHARACTERS = 64  # what Docker, Podman, containerd and CRI-O give is that long, and is nobody's choice
_UNIT_SUFFIXES = (".service", ".scope", ".slice")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a rule can ask about a process. None: unknown."""

    user: str | None
    command: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """A container and the processes in it that use a GPU."""

    container: Container
    processes: tuple[ProcessFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The keys of one rule; an empty tuple is a key that was not given."""

    namespace: Patterns = ()
    pod: Patterns = ()
    container: Patterns = ()
    image: Patterns = ()
    labels: tuple[tuple[str, Patterns], ...] = ()
    unit: Patterns = ()
    cgroup: Patterns = ()
    user: Patterns = ()
    command: Patterns = ()

    def fits(self, facts: Facts, every_process: bool) -> bool:
        """Whether the rule is about this container. A match without any key fits nothing."""
        if self == Match():
            return False
        return self._container_fits(facts.container) and self._processes_fit(facts, every_process)

    def _container_fits(self, it: Container) -> bool:
        return (
            _any(self.namespace, (it.namespace,))
            and _any(self.pod, (it.pod,))
            and _any(self.container, names_of(it))
            and _any(self.image, (it.image,))
            and _any(self.unit, units_of(it))
            and _any(self.cgroup, (it.cgroup,))
            and all(_any(patterns, (it.labels.get(label),)) for label, patterns in self.labels)
        )

    def _processes_fit(self, facts: Facts, every_process: bool) -> bool:
        if not self.user and not self.command:
            return facts.container.key != HOST
        fitting = [_any(self.user, (it.user,)) and _any(self.command, (it.command,)) for it in facts.processes]
        return bool(fitting) and (all(fitting) if every_process else any(fitting))


def names_of(container: Container) -> tuple[str, ...]:
    """What people call it: nothing while the agent has only the runtime's id, and shows the beginning of that."""
    unnamed = len(container.id) == _ID_CHARACTERS and container.id.startswith(container.name)
    return () if unnamed else (container.name,)


def units_of(container: Container) -> tuple[str, ...]:
    """The systemd units that a container runs in: its own and those around it, by its cgroup's path.

    None of those below a user's own manager (user@1000.service): whoever logs in may name one ssh.service.
    """
    parts = container.cgroup.split("/")
    end = next((at for at, part in enumerate(parts, 1) if _is_users_manager(part)), len(parts))
    own = (container.name,) if container.runtime == "systemd" and end == len(parts) else ()
    return (*own, *(part for part in parts[:end] if part.endswith(_UNIT_SUFFIXES)))


def _is_users_manager(part: str) -> bool:
    return part.startswith("user@") and part.endswith(".service")


def _any(patterns: Patterns, values: Iterable[str | None]) -> bool:
    if not patterns:
        return True
    return any(value is not None and fnmatchcase(value, pattern) for value in values for pattern in patterns)
