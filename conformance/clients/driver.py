# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The little of the CUDA driver API that programs here need, through ctypes: one device, one stream, one kernel.

The kernel takes every number of a buffer so many steps along a fixed random sequence, which lasts as long as it is
XX: so it shows whether results are right.
"""

from __future__ import annotations

import array
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Final

MULTIPLIER: Final = 6364136223846793005
INCREMENT: Final = 1442695040888963407
_WORD: Final = 1 << 64
_EACH: Final = 97  # of the buffer's numbers is looked at
_GUESS_PER_US: Final = 100
_SHORT_NS, _LONG_NS, _ROUNDS = 1_000_000, 3_000_000, 3
_SAME_RATIO: Final = 0.02  # two times that are no further apart are the same
_WAKING_NS: Final = 500_000_000  # at most, for the clocks to rise
_MULTIPROCESSORS: Final = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
_BLOCKING_SYNC: Final = 1  # CU_EVENT_BLOCKING_SYNC
_THREAD_LOCAL: Final = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

# It begins as in sim/include/ptx.h. The first parameter's name tells the simulated GPU how long a block lasts.
PTX: Final = b"""\
.version 6.3
.target sm_75
.address_size 64
.visible .entry advance(
	.param .u64 advance_ns,
	.param .u64 advance_iterations_per_us,
	.param .u64 advance_buffer
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<5>;
	.reg .b64 %rd<9>;
	ld.param.u64 %rd1, [advance_ns];
	ld.param.u64 %rd2, [advance_iterations_per_us];
	ld.param.u64 %rd3, [advance_buffer];
	mul.lo.u64 %rd4, %rd1, %rd2;
	div.u64 %rd4, %rd4, 1000;
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mad.lo.s32 %r4, %r1, %r2, %r3;
	cvta.to.global.u64 %rd5, %rd3;
	mul.wide.u32 %rd6, %r4, 8;
	add.s64 %rd7, %rd5, %rd6;
	ld.global.u64 %rd8, [%rd7];
AGAIN:
	setp.eq.u64 %p1, %rd4, 0;
	@%p1 bra DONE;
	mad.lo.u64 %rd8, %rd8, 6364136223846793005, 1442695040888963407;
	sub.u64 %rd4, %rd4, 1;
	bra.uni AGAIN;
DONE:
	st.global.u64 [%rd7], %rd8;
	ret;
}
"""


class CudaError(Exception):
    """A call that failed. `code` is its CUresult, `name` what CUDA calls that."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code, self.name = code, name


class Cuda:
    """The library at a path; `call` raises CudaError unless the call succeeds. OSError where it cannot be loaded."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def call(self, name: str, *arguments: object) -> None:
        """One call. Numbers of 64 bits and pointers have to come as ctypes values."""
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise CudaError(name, code, self._name_of(code))

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
            return f"CUresult {code}"
        return text.value.decode()


class Gpu:
    """The first device, its primary context current in this thread, a stream, and the kernel."""

    def __init__(self, library: str) -> None:
        self.cuda = Cuda(library)
        device, multiprocessors = ctypes.c_int(), ctypes.c_int()
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.stream, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self.cuda.call("cuInit", 0)
        self.cuda.call("cuDeviceGet", ctypes.byref(device), 0)
        self.cuda.call("cuDeviceGetAttribute", ctypes.byref(multiprocessors), _MULTIPROCESSORS, device)
        self.cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.cuda.call("cuCtxSetCurrent", context)
        self.cuda.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.cuda.call("cuModuleGetFunction", ctypes.byref(self._function), module, b"advance")
        self.cuda.call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)
        self.multiprocessors = multiprocessors.value

    def allocate(self, size: int) -> ctypes.c_uint64:
        """Device memory."""
        address = ctypes.c_uint64()
        self.cuda.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address

    def free(self, address: ctypes.c_uint64) -> None:
        """Frees what `allocate` gave."""
        self.cuda.call("cuMemFree_v2", address)

    def pinned(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """Host memory that the device can reach."""
        address = ctypes.c_void_p()
        self.cuda.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
        assert address.value
        return (ctypes.c_char * size).from_address(address.value)

    def write(self, address: int, data: bytes) -> None:
        """Host to device; waits. The copy's own call may return before, and the stream does not wait for it."""
        self.cuda.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        self.cuda.call("cuCtxSynchronize")

    def read(self, address: int, into: ctypes.Array[ctypes.c_char]) -> None:
        """Device to host; waits."""
        self.cuda.call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(address), ctypes.c_size_t(len(into)))

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def wait(self) -> None:
        """Waits until the stream is empty."""
        self.cuda.call("cuStreamSynchronize", self.stream)

    def event(self) -> ctypes.c_void_p:
        """An event that has a time."""
        event = ctypes.c_void_p()
        self.cuda.call("cuEventCreate", ctypes.byref(event), _BLOCKING_SYNC)
        return event

    def mark(self, event: ctypes.c_void_p) -> None:
        """Queues the event: it happens when what was launched before has ended."""
        self.cuda.call("cuEventRecord", event, self.stream)

    def wait_for(self, event: ctypes.c_void_p) -> None:
        """Waits until the event has happened."""
        self.cuda.call("cuEventSynchronize", event)

    def between_ns(self, first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
        """Time between two events that have happened, by the device's clock."""
        elapsed = ctypes.c_float()
        self.cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), first, second)
        return elapsed.value * 1e6

    def launch(self, blocks: int, threads: int, parameters: ctypes.Array[ctypes.c_void_p]) -> None:
        """Queues the kernel."""
        self.cuda.call("cuLaunchKernel", self._function, blocks, 1, 1, threads, 1, 1, 0, self.stream, parameters, None)


class Sequences:
    """A buffer of numbers, one for each thread, and launches that take each of them along its sequence.

    `spin_ns`: how long a block is to last. `pace`: the steps of a block in a microsecond, at one block to each
    multiprocessor; 0: it is measured at the start, when the device should be idle.
    """

    def __init__(self, gpu: Gpu, spin_ns: int, blocks: int, threads: int, pace: int = 0) -> None:
        self._gpu, self.blocks, self.threads, self._spin_ns = gpu, blocks, threads, spin_ns
        self._buffer = gpu.allocate(8 * blocks * threads)
        self.pace = pace or _GUESS_PER_US
        if not pace:
            self.pace = self._measured()
        self.launches = 0
        self._parameters = self._packed(spin_ns)
        gpu.write(self._buffer.value, array.array("Q", range(blocks * threads)).tobytes())

    @property
    def steps(self) -> int:
        """Steps of one launch."""
        return self._spin_ns * self.pace // 1000

    def launch(self) -> None:
        """Queues the kernel."""
        self._gpu.launch(self.blocks, self.threads, self._parameters)
        self.launches += 1

    def captured(self, launches: int) -> ctypes.c_void_p:
        """A CUDA graph of so many launches; `replayed` counts them."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        call, stream = self._gpu.cuda.call, self._gpu.stream
        call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        for _ in range(launches):
            self._gpu.launch(self.blocks, self.threads, self._parameters)
        call("cuStreamEndCapture", stream, ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        return executable

    def replayed(self, executable: ctypes.c_void_p, launches: int) -> None:
        """The graph, queued."""
        self._gpu.cuda.call("cuGraphLaunch", executable, self._gpu.stream)
        self.launches += launches

    def wrong(self) -> int:
        """How many of the numbers that are looked at are not where they must be. Waits."""
        self._gpu.wait()
        held = (ctypes.c_char * (8 * self.blocks * self.threads))()
        self._gpu.read(self._buffer.value, held)
        found = memoryview(held).cast("B").cast("Q")
        looked_at = range(0, len(found), _EACH)
        return misses([found[at] for at in looked_at], looked_at, self.launches * self.steps)

    def _packed(self, spin_ns: int) -> ctypes.Array[ctypes.c_void_p]:
        self._values = (ctypes.c_uint64(spin_ns), ctypes.c_uint64(self.pace), self._buffer)  # kept: pointed at
        return (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in self._values))

    def _measured(self) -> int:
        until_steady(lambda: self._timed_ns(_LONG_NS))
        return pace_of([(self._timed_ns(_SHORT_NS), self._timed_ns(_LONG_NS)) for _ in range(_ROUNDS)])

    def _timed_ns(self, spin_ns: int) -> int:
        parameters = self._packed(spin_ns)
        begun = time.monotonic_ns()
        self._gpu.launch(min(self.blocks, self._gpu.multiprocessors), self.threads, parameters)
        self._gpu.wait()
        return time.monotonic_ns() - begun


def until_steady(timed_ns: Callable[[], int]) -> None:
    """Times the same until two in a row take as long: the clocks of an idle device rise while it works."""
    before = spent = timed_ns()
    while spent < _WAKING_NS:
        took = timed_ns()
        if abs(took - before) <= _SAME_RATIO * before:
            return
        before, spent = took, spent + took


def pace_of(rounds: Sequence[tuple[int, int]]) -> int:
    """Steps in a microsecond, from the times of short and long launches that were to take _SHORT_NS and _LONG_NS.

    The difference of two lengths leaves out what a launch and a wait cost.
    """
    short_ns = min(short for short, _ in rounds)
    long_ns = min(long for _, long in rounds)
    return max(1, round(_GUESS_PER_US * (_LONG_NS - _SHORT_NS) / max(1, long_ns - short_ns)))


def misses(found: Sequence[int], begun: Sequence[int], steps: int) -> int:
    """How many of the numbers are not where `steps` take those that they began as."""
    multiplier, increment = jump(steps)
    pairs = zip(found, begun, strict=True)
    return sum(number != (multiplier * first + increment) % _WORD for number, first in pairs)


def jump(steps: int) -> tuple[int, int]:
    """Multiplier and increment of so many steps at once."""
    multiplier, increment = 1, 0
    one, two = MULTIPLIER, INCREMENT  # of 1, 2, 4 … steps
    while steps:
        if steps & 1:
            multiplier, increment = multiplier * one % _WORD, (increment * one + two) % _WORD
        one, two = one * one % _WORD, (one * two + two) % _WORD
        steps >>= 1
    return multiplier, increment
