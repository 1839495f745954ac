# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""libbpf through ctypes: objects, maps, links, ring buffers.

The only file that talks to libbpf.so.1. Owns every file descriptor and link that it hands out until `close()`; whatever
is not closed goes with the process, so nothing of ours stays in the kernel after a crash.
Source: libbpf 1.1 headers (bpf/libbpf.h, bpf/bpf.h).
"""

from __future__ import annotations

import ctypes as c
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from agent.core.errors import ProbeError, SetupError
from agent.node.preflight import kernel_version
from agent.probes import libbpf_log

_log = logging.getLogger(__name__)
_ENOUGH = -errno.EAGAIN  # libbpf counts this record as consumed, and stops
_SAMPLE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_size_t)
_FEW = 32  # reads of a map with room for thousands cost as much as so many look-ups
_BUFFER_BYTES = 128 * 1024  # of one map: what each read of it uses
_ALIGNED = 8
_DETACHED_AT_ONCE = 32
_UPROBE_MULTI = 48  # enum bpf_attach_type
_MULTI_RETURN = 1
_LINK_CREATE = 28  # enum bpf_cmd
_NO_PREALLOC = 1  # enum of map flags
_NO_EXIST = 1  # of updates
_ALLOCATES_ON_DEMAND = (6, 1)  # of Linux, in tracing programs (commit 96da3f7d489d)
_PREALLOCATED_PART = 4
_OF_NEWER_KERNELS = (b"returns",)  # unused where maps are preallocated
_BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}.get(os.uname().machine, 0)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "libbpf_set_print": (c.c_void_p, [c.c_void_p]),
    "bpf_object__open_file": (c.c_void_p, [c.c_char_p, c.c_void_p]),
    "bpf_object__load": (c.c_int, [c.c_void_p]),
    "bpf_object__close": (None, [c.c_void_p]),
    "bpf_object__btf": (c.c_void_p, [c.c_void_p]),
    "bpf_object__next_map": (c.c_void_p, [c.c_void_p, c.c_void_p]),
    "bpf_object__find_map_by_name": (c.c_void_p, [c.c_void_p, c.c_char_p]),
    "bpf_object__find_program_by_name": (c.c_void_p, [c.c_void_p, c.c_char_p]),
    "bpf_map__fd": (c.c_int, [c.c_void_p]),
    "bpf_map__max_entries": (c.c_uint32, [c.c_void_p]),
    "bpf_map__name": (c.c_char_p, [c.c_void_p]),
    "bpf_map__set_max_entries": (c.c_int, [c.c_void_p, c.c_uint32]),
    "bpf_map__map_flags": (c.c_uint32, [c.c_void_p]),
    "bpf_map__set_map_flags": (c.c_int, [c.c_void_p, c.c_uint32]),
    "bpf_map__reuse_fd": (c.c_int, [c.c_void_p, c.c_int]),
    "bpf_program__fd": (c.c_int, [c.c_void_p]),
    "bpf_program__set_expected_attach_type": (c.c_int, [c.c_void_p, c.c_int]),
    "bpf_program__set_autoload": (c.c_int, [c.c_void_p, c.c_bool]),
    "bpf_program__attach_uprobe_opts": (c.c_void_p, [c.c_void_p, c.c_int, c.c_char_p, c.c_size_t, c.c_void_p]),
    "bpf_program__attach": (c.c_void_p, [c.c_void_p]),
    "bpf_prog_test_run_opts": (c.c_int, [c.c_int, c.c_void_p]),
    "bpf_link__destroy": (c.c_int, [c.c_void_p]),
    "bpf_map_lookup_elem": (c.c_int, [c.c_int, c.c_void_p, c.c_void_p]),
    "bpf_map_lookup_and_delete_elem": (c.c_int, [c.c_int, c.c_void_p, c.c_void_p]),
    "bpf_map_update_elem": (c.c_int, [c.c_int, c.c_void_p, c.c_void_p, c.c_uint64]),
    "bpf_map_delete_elem": (c.c_int, [c.c_int, c.c_void_p]),
    "bpf_map_get_next_key": (c.c_int, [c.c_int, c.c_void_p, c.c_void_p]),
    "bpf_map_lookup_batch": (
        c.c_int,
        [c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p],
    ),
    "ring_buffer__new": (c.c_void_p, [c.c_int, _SAMPLE, c.c_void_p, c.c_void_p]),
    "ring_buffer__poll": (c.c_int, [c.c_void_p, c.c_int]),
    "ring_buffer__consume": (c.c_int, [c.c_void_p]),
    "ring_buffer__epoll_fd": (c.c_int, [c.c_void_p]),
    "ring_buffer__free": (None, [c.c_void_p]),
    "btf__find_by_name_kind": (c.c_int32, [c.c_void_p, c.c_char_p, c.c_uint32]),
    "btf__type_by_id": (c.c_void_p, [c.c_void_p, c.c_uint32]),
    "btf__name_by_offset": (c.c_char_p, [c.c_void_p, c.c_uint32]),
}


class _UprobeOptions(c.Structure):
    _fields_ = [
        ("sz", c.c_size_t),
        ("ref_ctr_offset", c.c_size_t),
        ("bpf_cookie", c.c_uint64),
        ("retprobe", c.c_bool),
        ("func_name", c.c_char_p),
    ]


class _RunOptions(c.Structure):
    """struct bpf_test_run_opts; a program without arguments needs none of it."""

    _fields_ = [("sz", c.c_size_t), ("_unused", c.c_uint64 * 9)]


class _UprobeMultiLink(c.Structure):
    """The part of union bpf_attr that BPF_LINK_CREATE reads for uprobe_multi (Linux 6.6, commit 89ae89f53d20)."""

    _fields_ = [
        ("prog_fd", c.c_uint32),
        ("target_fd", c.c_uint32),
        ("attach_type", c.c_uint32),
        ("flags", c.c_uint32),
        ("path", c.c_uint64),
        ("offsets", c.c_uint64),
        ("ref_ctr_offsets", c.c_uint64),
        ("cookies", c.c_uint64),
        ("count", c.c_uint32),
        ("multi_flags", c.c_uint32),
        ("pid", c.c_uint32),
        ("_pad", c.c_uint32),
    ]


class Library:
    """libbpf.so.1 with its signatures declared. What it prints goes to agent.probes.libbpf_log."""

    def __init__(self) -> None:
        try:
            self._dll = c.CDLL("libbpf.so.1", use_errno=True)
        except OSError as error:
            raise SetupError("libbpf.so.1 not found: install it (Debian: apt-get install libbpf1)") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        libbpf_log.install(self)

    def __getattr__(self, name: str) -> Any:  # the functions that __init__ sets
        raise AttributeError(name)


class Map:
    """A BPF map with keys and values as ctypes types. Works from a bare file descriptor too (the guardian's case)."""

    def __init__(self, lib: Library, fd: int, key: Any, value: Any) -> None:
        self._lib, self.fd, self._key, self._value = lib, fd, key, value
        self._buffers: list[c.Array[c.c_uint8]] = []  # as many as reads were under way at once

    def get(self, key: Any) -> Any | None:
        """The value at `key`, or None where there is none."""
        value = self._value()
        return value if self._lib.bpf_map_lookup_elem(self.fd, c.byref(key), c.byref(value)) == 0 else None

    def get_all(self, keys: Collection[Any]) -> dict[bytes, Any]:
        """The values at these keys, by the keys' bytes, without those where there is none.

        A few are looked up, for a system call each; for more the whole map is read, a batch for each.
        """
        if len(keys) <= _FEW:
            found = ((bytes(key), self.get(key)) for key in keys)
            return {key: value for key, value in found if value is not None}
        wanted = {bytes(key) for key in keys}
        return {at: value for key, value in self.items() if (at := bytes(key)) in wanted}

    def put(self, key: Any, value: Any) -> None:
        """Creates or replaces; OSError when the map is full."""
        if self._lib.bpf_map_update_elem(self.fd, c.byref(key), c.byref(value), 0):
            raise _os_error("bpf_map_update_elem")

    def add(self, key: Any, value: Any) -> bool:
        """Creates; False where there is an entry, which stays. OSError when the map is full."""
        if not self._lib.bpf_map_update_elem(self.fd, c.byref(key), c.byref(value), _NO_EXIST):
            return True
        if c.get_errno() == errno.EEXIST:
            return False
        raise _os_error("bpf_map_update_elem")

    def delete(self, key: Any) -> bool:
        """False when there was nothing at `key`."""
        return bool(self._lib.bpf_map_delete_elem(self.fd, c.byref(key)) == 0)

    def take(self, key: Any) -> Any | None:
        """The value at `key`, which is deleted by the same call (hash maps, Linux ≥ 5.14); None: there is none."""
        value = self._value()
        taken = self._lib.bpf_map_lookup_and_delete_elem(self.fd, c.byref(key), c.byref(value)) == 0
        return value if taken else None

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Every entry, copied in batches. Entries that come or go meanwhile may or may not be among them."""
        key, key_bytes, value, value_bytes = self._key, c.sizeof(self._key), self._value, c.sizeof(self._value)
        for keys, values in self.raw():
            for at in range(len(keys) // key_bytes):
                yield key.from_buffer_copy(keys, at * key_bytes), value.from_buffer_copy(values, at * value_bytes)

    def raw(self) -> Iterator[tuple[memoryview, memoryview]]:
        """The same as bytes, a batch at a time: for maps that are too large for an object per entry.

        Valid until the next step; of keys' and of values' size times the number of entries.
        """
        return self._batches(c.sizeof(self._value))

    def _batches(self, value_bytes: int) -> Iterator[tuple[memoryview, memoryview]]:
        try:
            buffer = self._buffers.pop()
        except IndexError:  # the first read, or one within or beside another one
            buffer = (c.c_uint8 * _BUFFER_BYTES)()
        try:
            yield from self._read(buffer, value_bytes)
        finally:
            self._buffers.append(buffer)

    def _read(self, buffer: c.Array[c.c_uint8], value_bytes: int) -> Iterator[tuple[memoryview, memoryview]]:
        key_bytes = c.sizeof(self._key)
        entries = (_BUFFER_BYTES - _ALIGNED) // (key_bytes + value_bytes)  # more than ever share a bucket
        data, keys = memoryview(buffer).cast("B"), c.addressof(buffer)
        first = (_BUFFER_BYTES - entries * value_bytes) // _ALIGNED * _ALIGNED  # of the values
        batch, count, start = c.c_uint64(), c.c_uint32(), None
        while True:
            count.value = entries
            code = self._lib.bpf_map_lookup_batch(
                self.fd, start, c.byref(batch), keys, keys + first, c.byref(count), None
            )
            failure = c.get_errno() if code else 0
            if failure not in (0, errno.ENOENT):
                raise OSError(failure, f"bpf_map_lookup_batch: {os.strerror(failure)}")
            yield data[: count.value * key_bytes], data[first : first + count.value * value_bytes]
            if failure == errno.ENOENT:
                return
            start = c.byref(batch)

    def per_cpu(self, key: Any) -> list[int]:
        """One u64 per possible CPU, of a PERCPU map."""
        values = (c.c_uint64 * _possible_cpus())()
        if self._lib.bpf_map_lookup_elem(self.fd, c.byref(key), values):
            raise _os_error("bpf_map_lookup_elem")
        return list(values)

    def per_cpu_array(self, entries: int) -> list[int]:
        """Sums over the CPUs, of the first entries of a PERCPU array of u64 (in batches: Linux ≥ 5.13)."""
        cpus, sums = _possible_cpus(), [0] * entries
        for keys, values in self._batches(8 * cpus):
            counts = values.cast("Q")
            for at, index in enumerate(keys.cast("I")):
                if index < entries:
                    sums[index] = sum(counts[at * cpus : (at + 1) * cpus])
        return sums

    def share(self, entries: int) -> Any:
        """The elements of an mmapable array, live: reading and writing them costs no system call."""
        stride = (c.sizeof(self._value) + 7) & ~7
        if stride != c.sizeof(self._value):
            raise ProbeError(f"{self._value.__name__} has {c.sizeof(self._value)} bytes: pad it to a multiple of 8")
        length = -(-stride * entries // mmap.PAGESIZE) * mmap.PAGESIZE
        return (self._value * entries).from_buffer(mmap.mmap(self.fd, length))


class RingBuffer:
    """The one consumer of a ring buffer map. `receive` is called from `consume()` with each record's bytes."""

    def __init__(self, lib: Library, fd: int, receive: Callable[[bytes], None]) -> None:
        self._lib = lib
        self._receive = receive
        self._left: int | None = None  # records that this call still takes; None: all
        self._callback = _SAMPLE(self._on_sample)
        self._ring = lib.ring_buffer__new(fd, self._callback, None, None)
        if not self._ring:
            raise ProbeError(f"ring buffer refused: {os.strerror(c.get_errno())}")

    def _on_sample(self, _context: int, data: int, size: int) -> int:
        self._receive(c.string_at(data, size))
        if self._left is None:
            return 0
        self._left -= 1
        return 0 if self._left > 0 else _ENOUGH

    @property
    def epoll_fd(self) -> int:
        """Readable when records wait."""
        return int(self._lib.ring_buffer__epoll_fd(self._ring))

    def consume(self, most: int | None = None) -> None:
        """Hands over all records that wait, and those that come meanwhile; no more than `most`, the others stay."""
        self._left = most
        self._lib.ring_buffer__consume(self._ring)

    def close(self) -> None:
        """Stops consuming. Records stay in the map."""
        if self._ring:
            self._lib.ring_buffer__free(self._ring)
            self._ring = None


@dataclass(frozen=True, slots=True)
class BpfLink:
    """Probes that are attached together: one of libbpf's links, or the file descriptor of a link made here."""

    handle: int
    is_descriptor: bool = False


# The verifier gives up (EAGAIN) when a signal, a tracer or a freezer wants the thread; after some tries so does libbpf.
_LOAD_ATTEMPTS = 5
_AGAIN_SECONDS = 0.1


class BpfObject:
    """A loaded CO-RE object. A context manager: leaving it detaches every link and frees every map.

    With `multi` the named programs are loaded for uprobe_multi links, one of which holds any number of probes:
    detaching costs a grace period per link, which such links wait for together; single ones are detached one by one, so
    a hundred take seconds. ProbeError before Linux 6.6. `also`: programs that are not loaded by default. `shared`: the
    maps of another object that it uses in place of its own, by their file descriptors.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_entries: dict[str, int] | None = None,
        multi: Collection[str] = (),
        also: Collection[str] = (),
        shared: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.lib = Library()
        self.multi = bool(multi)  # its uprobes are of uprobe_multi links
        self._links: set[BpfLink] = set()
        if not path.is_file():
            raise SetupError(f"BPF object {path} not found: run `make bpf`, or reinstall the package")
        for attempts_left in reversed(range(_LOAD_ATTEMPTS)):
            self._open(path, max_entries or {}, multi, also)
            for name, fd in shared.items():
                self._reuse(name, fd)
            if not self.lib.bpf_object__load(self._object):
                break
            code = c.get_errno()
            error = libbpf_log.load_error(code)
            self.close()
            if code != errno.EAGAIN or not attempts_left:
                raise error
            time.sleep(_AGAIN_SECONDS)
        if multi and not self._takes_multi(next(iter(multi))):
            self.close()
            raise ProbeError("the kernel has no uprobe_multi (Linux < 6.6)")

    def _open(self, path: Path, max_entries: dict[str, int], multi: Collection[str], also: Collection[str]) -> None:
        """Ready to be loaded."""
        self._object = self.lib.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            raise ProbeError(f"{path} is not a BPF object that libbpf can open: rebuild it with `make bpf`")
        if kernel_version(os.uname().release) < _ALLOCATES_ON_DEMAND:
            self._preallocate()
        for name, entries in max_entries.items():
            self.lib.bpf_map__set_max_entries(self._map(name), entries)
        for program in also:  # that not every kernel takes
            self.lib.bpf_program__set_autoload(self._program(program), True)
        for program in multi:
            self.lib.bpf_program__set_expected_attach_type(self._program(program), _UPROBE_MULTI)
        libbpf_log.clear()

    def _reuse(self, name: str, fd: int) -> None:
        if self.lib.bpf_map__reuse_fd(self._map(name), fd):
            raise ProbeError(f"the map {name} of another BPF object cannot be used: {os.strerror(c.get_errno())}")

    def _takes_multi(self, program: str) -> bool:
        """Whether the kernel has the link: older ones load such programs, too; newer ones refuse / as no file."""
        path = c.create_string_buffer(b"/")
        offset = c.c_uint64(1)
        request = _UprobeMultiLink(
            prog_fd=self.lib.bpf_program__fd(self._program(program)),
            attach_type=_UPROBE_MULTI,
            path=c.addressof(path),
            offsets=c.addressof(offset),
            count=1,
        )
        fd = _link_create(request)
        if fd >= 0:
            os.close(fd)
        return fd < 0 and c.get_errno() == errno.EBADF

    def _preallocate(self) -> None:
        """Preallocates all maps: older kernels warn of growing ones (or panic by panic_on_warn), real-time ones refuse.

        What is preallocated is never freed: so a quarter of the entries, which is within the same bound.
        """
        found = self.lib.bpf_object__next_map(self._object, None)
        while found:
            flags = self.lib.bpf_map__map_flags(found)
            if flags & _NO_PREALLOC and self.lib.bpf_map__max_entries(
                found
            ):  # task storage has none, and wants the flag
                self.lib.bpf_map__set_map_flags(found, flags & ~_NO_PREALLOC)
                entries = self.lib.bpf_map__max_entries(found) // _PREALLOCATED_PART
                unused = self.lib.bpf_map__name(found) in _OF_NEWER_KERNELS
                self.lib.bpf_map__set_max_entries(found, 1 if unused else entries)
            found = self.lib.bpf_object__next_map(self._object, found)

    def max_entries(self, name: str) -> int:
        """Of the map as it was loaded: before Linux 6.1 it is less than the object says."""
        return int(self.lib.bpf_map__max_entries(self._map(name)))

    def _map(self, name: str) -> int:
        found = self.lib.bpf_object__find_map_by_name(self._object, name.encode())
        if not found:
            raise ProbeError(f"the BPF object has no map {name}: rebuild it with `make bpf`")
        return int(found)

    @property
    def btf(self) -> int:
        """The object's own BTF, for `agent.probes.abi.check`."""
        return int(self.lib.bpf_object__btf(self._object))

    def run(self, program: str) -> None:
        """Runs a program of kind raw_tp once, here and now. ProbeError."""
        options = _RunOptions(sz=c.sizeof(_RunOptions))
        if self.lib.bpf_prog_test_run_opts(self.lib.bpf_program__fd(self._program(program)), c.byref(options)) < 0:
            raise ProbeError(f"{program} cannot be run: {os.strerror(c.get_errno())}")

    def map(self, name: str, key: Any, value: Any) -> Map:
        """The map called `name`."""
        return Map(self.lib, self.map_fd(name), key, value)

    def map_fd(self, name: str) -> int:
        """The descriptor of the map called `name`: for ring buffers, and to hand to another process."""
        return int(self.lib.bpf_map__fd(self._map(name)))

    def _program(self, name: str) -> int:
        found = self.lib.bpf_object__find_program_by_name(self._object, name.encode())
        if not found:
            raise ProbeError(f"the BPF object has no program {name}: rebuild it with `make bpf`")
        return int(found)

    def attach(self, program: str) -> BpfLink:
        """Attaches a program to what its section name gives. Returns a link for `detach`."""
        return self._link(self.lib.bpf_program__attach(self._program(program)), program)

    def attach_uprobes(
        self, program: str, path: str, probes: Sequence[tuple[int, int]], *, at_return: bool
    ) -> list[BpfLink]:
        """Attaches to several (file offset, cookie) of `path`, for every process that maps it. All of them or none."""
        if self.multi:
            return [self._attach_multi(program, path, probes, at_return=at_return)]
        links: list[BpfLink] = []
        try:
            links.extend(self.attach_uprobe(program, path, *probe, at_return=at_return) for probe in probes)
        except ProbeError:
            self.detach_all(links)
            raise
        return links

    def _attach_multi(self, program: str, path: str, probes: Sequence[tuple[int, int]], *, at_return: bool) -> BpfLink:
        offsets = (c.c_uint64 * len(probes))(*(offset for offset, _ in probes))
        cookies = (c.c_uint64 * len(probes))(*(cookie for _, cookie in probes))
        name = c.create_string_buffer(os.fsencode(path))
        request = _UprobeMultiLink(
            prog_fd=self.lib.bpf_program__fd(self._program(program)),
            attach_type=_UPROBE_MULTI,
            path=c.addressof(name),
            offsets=c.addressof(offsets),
            cookies=c.addressof(cookies),
            count=len(probes),
            multi_flags=_MULTI_RETURN if at_return else 0,
        )
        fd = _link_create(request)
        if fd < 0:
            raise ProbeError(f"cannot attach {program} at {len(probes)} places: {os.strerror(c.get_errno())}")
        link = BpfLink(fd, is_descriptor=True)
        self._links.add(link)
        return link

    def attach_uprobe(self, program: str, path: str, offset: int, cookie: int, *, at_return: bool) -> BpfLink:
        """Attaches to a file offset of `path`, for every process that maps the file, past and future."""
        options = _UprobeOptions(sz=c.sizeof(_UprobeOptions), bpf_cookie=cookie, retprobe=at_return)
        link = self.lib.bpf_program__attach_uprobe_opts(
            self._program(program), -1, os.fsencode(path), offset, c.byref(options)
        )
        return self._link(link, f"{program} at {path}+{offset:#x}")

    def _link(self, handle: int | None, what: str) -> BpfLink:
        if not handle:
            raise ProbeError(f"cannot attach {what}: {os.strerror(c.get_errno())}")
        link = BpfLink(handle)
        self._links.add(link)
        return link

    def detach(self, link: BpfLink) -> None:
        """Detaches a probe. Slow (an RCU grace period): not for the hot path."""
        self._links.discard(link)
        if link.is_descriptor:
            os.close(link.handle)
        else:
            self.lib.bpf_link__destroy(link.handle)

    def detach_all(self, links: Iterable[BpfLink]) -> None:
        """Detaches several in this order; they wait for one grace period together where the kernel lets them."""
        links = list(links)
        with suppress(RuntimeError), ThreadPoolExecutor(_DETACHED_AT_ONCE) as threads:  # no thread may be available
            list(threads.map(self.detach, [link for link in links if link.is_descriptor]))
        for link in links:
            if link in self._links:
                self.detach(link)

    def close(self) -> None:
        """Detaches everything and frees the maps that no other process holds."""
        self.detach_all(self._links)
        if self._object:
            self.lib.bpf_object__close(self._object)
            self._object = None

    def __enter__(self) -> BpfObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _link_create(request: _UprobeMultiLink) -> int:
    return int(c.CDLL(None, use_errno=True).syscall(_BPF_SYSCALL, _LINK_CREATE, c.byref(request), c.sizeof(request)))


def load_uprobes(path: Path, programs: Collection[str], *, also: Collection[str] = ()) -> BpfObject:
    """Loads for uprobe_multi where the kernel has it (Linux ≥ 6.6), else for single uprobes.

    `programs`: all that will be attached as uprobes. `also`: programs that are not loaded by default.
    """
    try:
        return BpfObject(path, multi=programs, also=also)
    except ProbeError as error:
        _log.info("no uprobe_multi on this kernel, so detaching is slower: %s", error)
        return BpfObject(path, also=also)


@cache
def _possible_cpus() -> int:
    last = Path("/sys/devices/system/cpu/possible").read_text().strip().split("-")[-1].split(",")[-1]
    return int(last) + 1


def _os_error(call: str) -> OSError:
    code = c.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
