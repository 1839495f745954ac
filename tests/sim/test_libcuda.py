# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The client library keeps the driver's promises, each a function in libcuda_test.c; its exports are fit for probes."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.node.elf import exported_functions
from tools.harness.node import BUILD

_HERE = Path(__file__).parent
_SIM = _HERE.parents[1] / "sim"
_LIBCUDA = BUILD / "lib" / "libcuda.so.1"
_NAMES = re.findall(r"^\s*TEST\((\w+)\)", (_HERE / "libcuda_test.c").read_text(), re.MULTILINE)
_KILLS_THE_SERVER = "calls_fail_when_the_server_is_gone"
_PLAIN = BUILD / "plain" / "libcuda.so.1"
_NEWEST = 13050
_NOT_SUPPORTED = 801
_PER_THREAD = 2


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("libcuda") / "libcuda_test"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", f"-I{_SIM / 'include'}"]
    libraries = [f"-L{_LIBCUDA.parent}", "-lcuda", "-lpthread"]
    subprocess.run(["gcc", *flags, str(_HERE / "libcuda_test.c"), "-o", str(path), *libraries], check=True)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    settings = {"GPUSIM_GPUS": "2", "GPUSIM_SMS": "4", "GPUSIM_MEMORY": "3GiB"}
    command = [str(BUILD / "bin" / "gpusim"), "serve", "--dir", str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **settings}, text=True, stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        yield server
        if server.poll() is None:
            server.terminate()
        server.wait(timeout=30)


@pytest.mark.parametrize("name", _NAMES)
def test_of_libcuda(program: Path, server: subprocess.Popen[str], tmp_path: Path, name: str) -> None:
    client = {
        "GPUSIM_DIR": str(tmp_path),
        "LD_LIBRARY_PATH": str(_LIBCUDA.parent),
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "no-mps"),
        "SERVER_PID": str(server.pid),
    }
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    command = [str(program), name]
    done = subprocess.run(command, env={**inherited, **client}, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    if name == _KILLS_THE_SERVER:
        assert server.wait(timeout=30) == -signal.SIGKILL
    else:
        server.terminate()
        assert server.wait(timeout=30) == 0


def test_every_test_of_libcuda_is_known_to_pytest(program: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(_LIBCUDA.parent)}
    listed = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.split() == _NAMES


@dataclass(frozen=True, slots=True)
class Exports:
    """The names that the library exports and where each lies in memory; and its two ways of asking for them."""

    path: Path
    every: dict[str, int]
    library: ctypes.CDLL

    @property
    def addresses(self) -> dict[str, int]:
        """Of the calls that are modelled."""
        text = (_SIM / "libcuda" / "exports.h").read_text()
        names = {
            name
            for names in re.findall(r'^[EP]\("\w*", \d+, (\w+)(?:, (\w+))?\),$', text, re.MULTILINE)
            for name in names
        }
        return {name: self.every[name] for name in names if name}

    def ask(self, name: str, version: int, flags: int) -> int | None:
        """What cuGetProcAddress_v2 answers; checks that the first form answers the same."""
        old, new, status = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(-1)
        text, wide = name.encode(), ctypes.c_uint64(flags)
        first = self.library.cuGetProcAddress(text, ctypes.byref(old), version, wide)
        second = self.library.cuGetProcAddress_v2(text, ctypes.byref(new), version, wide, ctypes.byref(status))
        assert (first, old.value) == (second, new.value)
        assert (status.value == 0) == (second == 0) == (new.value is not None)
        return new.value


@pytest.fixture(scope="module", params=[_LIBCUDA, _PLAIN], ids=["checked", "plain"])
def exports(request: pytest.FixtureRequest) -> Exports:
    path: Path = request.param
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    names = [line.split()[2] for line in listed.stdout.splitlines() if line.split()[1] == "T"]
    library = ctypes.CDLL(str(path))
    found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names}
    return Exports(path, found, library)


def base(name: str) -> str:
    """The name that programs ask for."""
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name)


def versions() -> list[int]:
    """All versions of CUDA in which the driver changed a function."""
    text = (_SIM / "libcuda" / "exports.h").read_text()
    return sorted({int(version) for version in re.findall(r'^[EP]\("\w+", (\d+),', text, re.MULTILINE)})


@pytest.mark.skipif(platform.machine() != "x86_64", reason="how real libraries for x86-64 begin")
def test_exports_begin_as_those_of_real_libraries(exports: Exports) -> None:
    text = exports.path.read_bytes()
    begins = [text[at : at + 12] for at in exported_functions(str(exports.path), "cu").values()]
    if exports.path == _PLAIN:  # but for some that call nothing, such as cuDriverGetVersion
        assert sum(code.startswith(b"\x55") for code in begins) > 0.98 * len(begins)
    else:
        assert {(code[:2], code[6:]) for code in begins} == {(b"\x81\x3d", bytes.fromhex("00ba1c32740c"))}


def test_there_are_as_many_exports_as_in_a_real_library_and_those_that_are_not_modelled_say_so(
    exports: Exports,
) -> None:
    assert len(exports.every) > 640
    assert all(name.startswith("cu") for name in exports.every)
    unmodelled = sorted(exports.every.keys() - exports.addresses.keys())
    assert len(unmodelled) > 300
    assert {getattr(exports.library, name)(None, None) for name in unmodelled} == {_NOT_SUPPORTED}


def test_no_two_exports_share_an_address(exports: Exports) -> None:
    assert len(exports.addresses) > 250
    assert len(set(exports.addresses.values())) == len(exports.addresses)


def test_every_modelled_export_can_be_had_from_cu_get_proc_address(exports: Exports) -> None:
    names = {address: name for name, address in exports.addresses.items()}
    had = set()
    for wanted in sorted({base(name) for name in exports.addresses}):
        for version in versions():
            for flags in (0, _PER_THREAD):
                address = exports.ask(wanted, version, flags)
                if address in names:  # and is no form that is not modelled
                    assert base(names[address]) == wanted
                    had.add(names[address])
    assert had == exports.addresses.keys()


def test_per_thread_streams_are_given_to_those_that_ask_for_them(exports: Exports) -> None:
    names = {address: name for name, address in exports.addresses.items()}
    twins = {name[:-5]: name for name in exports.addresses if name.endswith(("_ptsz", "_ptds"))}
    assert len(twins) > 50
    for wanted in sorted({base(name) for name in exports.addresses}):
        plain, own = exports.ask(wanted, _NEWEST, 0), exports.ask(wanted, _NEWEST, _PER_THREAD)
        assert plain is not None
        assert own is not None
        if plain in names:
            assert not names[plain].endswith(("_ptsz", "_ptds"))
            assert names[own] == twins.get(names[plain], names[plain])


def test_what_does_not_exist_is_not_given(exports: Exports) -> None:
    assert exports.ask("cuNothing", _NEWEST, 0) is None
    assert exports.ask("cuMemAlloc_v2", _NEWEST, 0) is None  # programs ask for the name without its version
    assert exports.ask("cuLaunchKernelEx", 11050, 0) is None  # too old for it
