# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whatever a libcudart asks libcuda for is probed, or it is known why it need not be.

The lists in tests/fixtures/libcudart are those of NVIDIA's CUDA runtimes; `python -m tools.runtime_functions FILE`
makes one of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from agent.probes.symbols import SYMBOLS

LISTS: Final = sorted((Path(__file__).parents[3] / "fixtures" / "libcudart").glob("*.txt"))
_FORM: Final = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
PROBED: Final = {_FORM.sub("", symbol.name) for symbol in SYMBOLS}
PER_THREAD: Final = {_FORM.sub("", symbol.name) for symbol in SYMBOLS if symbol.name.endswith(("_ptds", "_ptsz"))}

NOT_PROBED: Final[dict[str, str]] = {  # patterns of whole names
    r"cu(?!GetProc|Get(Error|Export))[A-Z]\w*?(Get|Is)[A-Z]\w*": "asks for something and changes nothing",
    r"cuGet(ErrorName|ErrorString|ExportTable|ProcAddress)|cuInit|cuDeviceCanAccessPeer": "asks",
    r"cuDeviceGet|cuDeviceTotalMem|cuEventElapsedTime|cuLibraryEnumerateKernels|cuGraphNodeFindInClone": "asks",
    r"cuGraphDebugDotPrint|cuLogs\w+|cuProfiler\w+|cuDevice(Unr|R)egisterAsyncNotification": "writes of what was done",
    r"cu(GL|EGL|VDPAU|Graphics)[A-Z]?\w*": "shares memory with a graphics driver, whose bytes NVML counts",
    r"cu(Tex|Surf)(Ref|Object)\w+|cuLink\w+|cuOccupancy\w+": "no work, no memory of its own that is worth an account",
    r"cu(Func|Kernel)Set(Attribute|CacheConfig|SharedMemConfig)": "how a kernel will run, which its launch tells",
    r"cu(Library|Module)(Load|Unload)\w*": "code and global variables: in NVML's bytes, of a size that no argument has",
    r"cuCtxDetach": "of CUDA 3 and before; libcudart calls it for contexts that it attached to",
    r"cuCtx(Dis|En)ablePeerAccess|cuCtxResetPersistingL2Cache": "what later copies and kernels may do",
    r"cuCtxSet(CacheConfig|Limit|SharedMemConfig)|cuDevicePrimaryCtxSetFlags": "settings; NVML counts their memory",
    r"cuDevSmResourceSplit(ByCount)?|cuDevResourceGenerateDesc": "describes a green context that is made later",
    r"cuSubgrid\w+|cuGreenCtxStreamCreate": "makes what later launches name",
    r"cu(Ctx|GreenCtx)(Record|Wait)Event|cuEvent(Create|Destroy)": "orders work",
    r"cuStream(AttachMemAsync|CopyAttributes|SetAttribute|UpdateCaptureDependencies)": "orders work",
    r"cuStreamAddCallback|cuLaunchHostFunc|cuThreadExchangeStreamCaptureMode": "no work of the GPU",
    r"cuStream(Wait|Write)Value(32|64)|cuStreamBatchMemOp|cuFlushGPUDirectRDMAWrites": "some bytes, to order work",
    r"cu(Signal|Wait)ExternalSemaphoresAsync|cuImportExternalSemaphore|cuDestroyExternalSemaphore": "orders work",
    r"cuImportExternalMemory|cuDestroyExternalMemory|cuIpc(Open|Close)\w+": "counted for the process that exported it",
    r"cuMemPool(Create|Destroy|Export\w+|Import\w+|Set\w+|TrimTo)|cu(Device|Mem)SetMemPool": "what is unused in pools",
    r"cuMemAdvise|cuMemDiscardBatchAsync": "moves nothing by itself",
    r"cuGraph(Add|Remove)Dependencies|cuGraphAdd(Empty|Host|Event\w+|ExternalSemaphores\w+)Node": "no work of the GPU",
    r"cuGraph(Exec)?(Host|Event\w+?|ExternalSemaphores\w+?)NodeSet(Params|Event)": "no work of the GPU",
    r"cuGraphKernelNode(CopyAttributes|SetAttribute)|cuGraphUpload": "how a kernel will run, which its node tells",
    r"cuGraph(Retain|Release)UserObject|cuUserObject\w+": "keeps what the program made",
    r"cuGraphConditionalHandleCreate": "a value that a graph reads; what runs how often only the GPU knows",
    r"cuDevice(GraphMemTrim|SetGraphMemAttribute)": "what no graph uses, which is NVML's",
}


def names(path: Path) -> list[list[str]]:
    """Of each line its words: name, version, and `per-thread`."""
    return [line.split() for line in path.read_text().splitlines()]


def unexplained(asked: Iterable[str]) -> list[str]:
    """Those that are neither probed nor in the table."""
    return sorted(
        name for name in asked if name not in PROBED and not any(re.fullmatch(one, name) for one in NOT_PROBED)
    )


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_what_a_runtime_asks_for_is_probed_or_known_not_to_matter(path: Path) -> None:
    found = unexplained(words[0] for words in names(path))
    assert not found, (
        f"libcudart {path.stem} asks for functions that no probe is on: probe them (agent/probes/symbols.py), or write "
        f"into NOT_PROBED why they do no work of the GPU and change no memory: {', '.join(found)}"
    )


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_forms_for_per_thread_streams_that_a_runtime_asks_for_are_probed_too(path: Path) -> None:
    asked = {words[0] for words in names(path) if words[2:] == ["per-thread"]}
    assert asked & PROBED
    assert asked & PROBED - PER_THREAD == set()


def test_each_reason_is_of_a_function_that_some_runtime_asks_for() -> None:
    asked = {words[0] for path in LISTS for words in names(path)}
    assert [one for one in NOT_PROBED if not any(re.fullmatch(one, name) for name in asked)] == []


def test_nothing_that_is_probed_is_in_the_table() -> None:
    asked = {words[0] for path in LISTS for words in names(path)} & PROBED
    matched = {name for name in asked if any(re.fullmatch(one, name) for one in NOT_PROBED)}
    assert {name for name in matched if "Get" not in name} == set()


def test_an_unknown_function_is_reported() -> None:
    invented = ["cuMemXyz", "cuLaunchXyz", "cuGraphAddXyzNode", "cuStreamXyz", "cuCtxXyz", "cuArrayXyz"]
    assert unexplained([*invented, "cuLaunchKernel", "cuMemGetInfo"]) == sorted(invented)
