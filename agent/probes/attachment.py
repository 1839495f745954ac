# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Uprobes on the functions of files: loading an object for them, where a probe goes in, and which files have some.

Invariants: a file is attached once for each purpose, whatever paths lead to it; return probes are attached before entry
probes and detached after them, as an entry whose return is not seen would wait for it forever; a file that is written
over loses its probes, for a breakpoint left in new content would stand in the middle of an instruction.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import ProbeError
from agent.node.instructions import AT_ENTRY, LONGEST_BYTES, ProbePlace, may_become_a_call
from agent.probes.libbpf import BpfLink, BpfObject
from agent.probes.libraries import FileChanges, FileId, OpenFile
from agent.probes.return_probes import danger

_log = logging.getLogger(__name__)
_MOST_WRITES: Final = 1000  # to one file, in …
_WRITES_NS: Final = 10 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class ProbedFunction:
    """A function of a file, by the file offset of its first byte, and the programs for its entry and its return.

    Both probes go in at `place`, which `agent.node.instructions.places` finds.
    """

    name: str
    offset: int
    cookie: int
    entry: str | None
    at_return: str | None
    place: ProbePlace = AT_ENTRY

    @property
    def probe_offset(self) -> int:
        """The file offset of both probes."""
        return self.offset + self.place.distance


class ProbedCode:
    """The bytes of a file that probes lie on. While they are the same, the probes are where they belong.

    Times say nothing: a byte that is written over with itself changes them, and they can be set.
    """

    def __init__(self, descriptor: int, functions: Sequence[ProbedFunction]) -> None:
        self._descriptor = os.dup(descriptor)
        self._offsets = sorted({place for one in functions for place in (one.offset, one.probe_offset)})
        self._digest = self._read(self._descriptor)

    def is_in(self, descriptor: int) -> bool:
        """Whether another open file has them."""
        try:
            return self._read(descriptor) == self._digest
        except OSError:
            return False

    def is_unchanged(self) -> bool:
        """Whether the file still has them."""
        return self.is_in(self._descriptor)

    def close(self) -> None:
        """Once."""
        os.close(self._descriptor)

    def _read(self, descriptor: int) -> bytes:
        digest = hashlib.blake2b()
        for offset in self._offsets:
            digest.update(os.pread(descriptor, LONGEST_BYTES, offset).ljust(LONGEST_BYTES, b"\0"))
        return digest.digest()


@dataclass(slots=True, eq=False)
class Attachment:
    """The probes of one file, in the order in which they were attached. `failed`: function → why it has none."""

    file: FileId
    version: tuple[int, int]
    purpose: Hashable
    path: str
    watch: int | None  # of FileChanges
    links: list[BpfLink] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    code: ProbedCode | None = None  # None: nothing is probed
    writes: int = 0  # after which its probes stayed, since `writes_since_ns`
    writes_since_ns: int = 0


class Attachments:
    """All attachments of one loaded object. For one thread at a time: its owner locks.

    `dropped` is called with each attachment whose probes were just detached, for whatever reason but `close`.
    """

    def __init__(self, bpf: BpfObject, dropped: Callable[[Attachment], None]) -> None:
        self._bpf, self._dropped = bpf, dropped
        self._attachments: dict[FileId, dict[Hashable, Attachment]] = {}  # by purpose
        self.changes = FileChanges()

    def find(self, opened: OpenFile, purpose: Hashable = None) -> Attachment | None:
        """What is attached to the file already. Drops what was attached to it before it was replaced in place."""
        for attachment in list(self._attachments.get(opened.file, {}).values()):
            if attachment.version == opened.version:
                continue
            if attachment.code is not None and attachment.code.is_in(opened.descriptor):
                attachment.version = opened.version
            else:  # other functions at these offsets
                _log.warning("%s was replaced in place: its probes are attached again", opened.path)
                self.drop(attachment)
        return self._attachments.get(opened.file, {}).get(purpose)

    def attach(
        self, opened: OpenFile, functions: Callable[[int], Sequence[ProbedFunction]], purpose: Hashable = None
    ) -> Attachment:
        """Attaches to what `functions` finds in the open file (a descriptor); what it raises, this raises.

        What the kernel refuses is in the attachment's `failed`; a caller that wants all or nothing drops it then.
        """
        watch = self.changes.watch(opened.descriptor, opened.path)  # first: no change after the look is missed
        attachment = Attachment(opened.file, opened.version, purpose, opened.path, watch)
        self._attachments.setdefault(opened.file, {})[purpose] = attachment
        try:
            found = functions(opened.descriptor)
            attachment.code = ProbedCode(opened.descriptor, found) if found else None
            self._attach_all(attachment, opened.descriptor, found)
        except BaseException:
            self.drop(attachment)
            raise
        return attachment

    def _attach_all(self, attachment: Attachment, descriptor: int, functions: Sequence[ProbedFunction]) -> None:
        path = f"/proc/self/fd/{descriptor}"  # that very file, whatever the path is by now
        functions = self._without_deadly(attachment, descriptor, functions)
        for at_return in (True, False):
            for program, group in _by_program(functions, at_return):
                self._attach_program(attachment, path, program, group, at_return=at_return)

    def _without_deadly(
        self, attachment: Attachment, descriptor: int, functions: Sequence[ProbedFunction]
    ) -> Sequence[ProbedFunction]:
        """Leaves out those whose probe the kernel makes a system call of, if processes under seccomp die of that."""
        calls = [one for one in functions if may_become_a_call(os.pread(descriptor, LONGEST_BYTES, one.probe_offset))]
        why = danger() if calls else None
        if why is None:
            return functions
        for one in calls:
            attachment.failed[one.name] = f"the kernel makes a call of its first instruction, and {why}"
            _log.warning("%s of %s: %s", one.name, attachment.path, attachment.failed[one.name])
        return [one for one in functions if one not in calls]

    def _attach_program(
        self, attachment: Attachment, path: str, program: str, functions: list[ProbedFunction], *, at_return: bool
    ) -> None:
        """All at once; where that is refused, one by one, to learn which it is."""
        probes = [(function.probe_offset, function.cookie) for function in functions]
        try:
            attachment.links += self._bpf.attach_uprobes(program, path, probes, at_return=at_return)
            return
        except ProbeError as error:
            _log.debug("%s: attaching one by one: %s", attachment.path, error)
        for function, probe in zip(functions, probes, strict=True):
            try:
                attachment.links += self._bpf.attach_uprobes(program, path, [probe], at_return=at_return)
            except ProbeError as error:
                attachment.failed[function.name] = str(error)
                _log.warning("%s of %s: %s", function.name, attachment.path, error)

    def drop(self, attachment: Attachment) -> None:
        """Detaches the probes of a file. Nothing when they are detached already."""
        of_file = self._attachments.get(attachment.file, {})
        if of_file.get(attachment.purpose) is not attachment:
            return
        del of_file[attachment.purpose]
        if not of_file:
            del self._attachments[attachment.file]
        if attachment.watch is not None and all(one.watch != attachment.watch for one in self._all()):
            self.changes.forget(attachment.watch)
        self._bpf.detach_all(reversed(attachment.links))
        attachment.links = []
        if attachment.code is not None:
            attachment.code.close()
        self._dropped(attachment)

    def drop_changed(self, watches: Collection[int]) -> list[Attachment]:
        """Detaches from the files of these watches (`changes.take()`) whose probed content is being written over."""
        written = [one for one in self._all() if one.watch in watches]
        changed = [one for one in written if one.code is None or not one.code.is_unchanged()]
        for attachment in written:
            if attachment not in changed:
                self._count_write(attachment)
        for attachment in changed:
            _log.warning("%s is written over in place: it has no probes until that is done", attachment.path)
            self.drop(attachment)
        return changed

    def _count_write(self, attachment: Attachment) -> None:
        """A file that is written all the time is watched no more: the next look compares its content anyway."""
        now_ns = monotonic_ns()
        if now_ns - attachment.writes_since_ns > _WRITES_NS:
            attachment.writes, attachment.writes_since_ns = 0, now_ns
        attachment.writes += 1
        if attachment.writes > _MOST_WRITES and attachment.watch is not None:
            _log.warning("%s is written without an end: if its code changes, that is noticed late", attachment.path)
            self.changes.forget(attachment.watch)
            attachment.watch = None

    def __len__(self) -> int:
        return sum(1 for _ in self._all())

    def _all(self) -> Iterator[Attachment]:
        return (attachment for of_file in self._attachments.values() for attachment in of_file.values())

    def close(self) -> None:
        """Watches no file any more; the probes go with the object."""
        self.changes.close()
        for attachment in self._all():
            if attachment.code is not None:
                attachment.code.close()
                attachment.code = None


def _by_program(functions: Sequence[ProbedFunction], at_return: bool) -> Iterator[tuple[str, list[ProbedFunction]]]:
    groups: dict[str, list[ProbedFunction]] = {}
    for function in functions:
        program = function.at_return if at_return else function.entry
        if program is not None:
            groups.setdefault(program, []).append(function)
    yield from groups.items()
