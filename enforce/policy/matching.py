# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether a rule's match fits a container, and whether one match surely fits whatever another one fits. Pure.

Patterns are shell patterns in which case counts; a tuple of them means any of them; every key that is given must match,
and what is unknown about a container matches nothing, not even `*`. `user` and `command` are about processes: an
offline rule needs all of a container's processes to match (`every_process`), an online rule or `protect` any one. The
pseudo-container of the host is matched only through them: it is everything else that runs on the machine. `covers`
answers for certain only: two patterns that some name could match both are no overlap until such a name runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from agent.core.model import HOST, Container

Patterns = tuple[str, ...]
_ID_CHARACTERS = 64  # of the ids that Docker, Podman, containerd and CRI-O generate
_ENDS = (".service", ".scope")
_UNIT_SUFFIXES = (*_ENDS, ".slice")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What a rule can match of a process. None: unknown."""

    user: str | None
    command: str | None


@dataclass(frozen=True, slots=True)
class ContainerFacts:
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

    def fits(self, facts: ContainerFacts, every_process: bool) -> bool:
        """Whether the rule is about this container. A match without any key fits nothing."""
        if self == Match():
            return False
        # A name that a user chose himself gives no rights: with it a container can be slowed, never preferred.
        names = names_of(facts.container) if every_process or facts.container.uid is None else ()
        return self.fits_container(facts.container, names) and self._processes_fit(facts, every_process)

    def fits_container(self, it: Container, names: tuple[str, ...]) -> bool:
        """Whether all keys but those about processes fit; `names`: those that count."""
        return (
            _any(self.namespace, (it.namespace,))
            and _any(self.pod, (it.pod,))
            and _any(self.container, names)
            and _any(self.image, (it.image,))
            and _any(self.unit, units_of(it))
            and _any(self.cgroup, (it.cgroup,))
            and all(_any(patterns, (it.labels.get(label),)) for label, patterns in self.labels)
        )

    def _processes_fit(self, facts: ContainerFacts, every_process: bool) -> bool:
        if not self.user and not self.command:
            return facts.container.key != HOST
        fitting = [_any(self.user, (it.user,)) and _any(self.command, (it.command,)) for it in facts.processes]
        return bool(fitting) and (all(fitting) if every_process else any(fitting))


def names_of(container: Container) -> tuple[str, ...]:
    """The container's name, if it is known: until then the agent shows the beginning of the runtime's id."""
    unnamed = len(container.id) == _ID_CHARACTERS and container.id.startswith(container.name)
    return () if unnamed else (container.name,)


def units_of(container: Container) -> tuple[str, ...]:
    """The systemd units that a container runs in: its own and those around it, by its cgroup's path.

    None of those below a service or scope: it may be delegated to what runs in it, which may make cgroups of any name,
    as each user's own manager (user@1000.service) is.
    """
    parts = container.cgroup.split("/")
    end = next((at for at, part in enumerate(parts, 1) if part.endswith(_ENDS)), len(parts))
    own = (container.name,) if container.runtime == "systemd" and end == len(parts) else ()
    return (*own, *(part for part in parts[:end] if part.endswith(_UNIT_SUFFIXES)))


def _any(patterns: Patterns, values: Iterable[str | None]) -> bool:
    if not patterns:
        return True
    return any(value is not None and fnmatchcase(value, pattern) for value in values for pattern in patterns)


_KEYS = ("namespace", "pod", "container", "image", "unit", "cgroup", "user", "command")


def covers(wide: Match, narrow: Match) -> bool:
    """Every container (and process) that fits `narrow` fits `wide`."""
    if wide == Match():
        return False
    narrow_labels = dict(narrow.labels)
    return all(_cover(getattr(wide, key), getattr(narrow, key)) for key in _KEYS) and all(
        _cover(patterns, narrow_labels.get(label, ())) for label, patterns in wide.labels
    )


def about_processes(match: Match) -> bool:
    """Whether it matters if one process must match or all of them."""
    return bool(match.user or match.command)


def _cover(wide: Patterns, narrow: Patterns) -> bool:
    if not wide:
        return True
    return bool(narrow) and all(any(_includes(outer, inner) for outer in wide) for inner in narrow)


def _includes(outer: str, inner: str) -> bool:
    """Whether `inner`, read as text, matches `outer`: its wildcards are then where one of `outer` matches anything."""
    if outer == inner:
        return True
    if "[" in inner or (set("*?") & set(inner) and set("[?") & set(outer)):
        return False
    return fnmatchcase(inner, outer)
