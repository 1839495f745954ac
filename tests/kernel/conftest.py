# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The real BPF object on real uprobes; only the GPU is simulated. One node for all tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs import every_symbol_calls as calls
from tests.support.programs.driver import Driver, compile_driver
from tools.harness.node import BUILD, Node, simulated_node


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """driver.c, compiled against the simulated libcuda as any program is against the real one."""
    return compile_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def every_symbol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """every_symbol.c, which calls the symbols that a test names."""
    return calls.build(tmp_path_factory.mktemp("every_symbol") / "every_symbol")


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two small GPUs."""
    with simulated_node(tmp_path_factory.mktemp("gpu"), {"gpus": "2", "memory": "4GiB"}) as node:
        yield node


@pytest.fixture(scope="session")
def driver(program: Path, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Starts programs whose every driver call a test decides."""
    libcuda = tmp_path_factory.mktemp("lib") / "libcuda.so.1"
    shutil.copyfile(BUILD / "lib" / "libcuda.so.1", libcuda)
    return Driver(program, node, libcuda)


@pytest.fixture(scope="session")
def graphs(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Starts graphs.c."""
    return replace(driver, program=compile_driver(tmp_path_factory.mktemp("graphs"), "graphs"))


@pytest.fixture
def fresh_probes() -> Iterator[LibcudaProbes]:
    """Loaded, and attached to nothing."""
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        yield probes


@pytest.fixture(scope="session")
def plain_driver(program: Path, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """With the libcuda whose functions begin with a push, as in 580: probes stand at their first byte."""
    libcuda = tmp_path_factory.mktemp("plain") / "libcuda.so.1"
    shutil.copyfile(BUILD / "plain" / "libcuda.so.1", libcuda)
    return Driver(program, node, libcuda)


@pytest.fixture(scope="module")
def own_probes(driver: Driver) -> Iterator[LibcudaProbes]:
    """Attached, for the programs of one module alone: where what all share is changed, or nothing else may be seen."""
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        assert not probes.ensure(str(driver.libcuda)).failed
        yield probes


@pytest.fixture(scope="session")
def probes(driver: Driver) -> Iterator[LibcudaProbes]:
    """Attached before any program starts; the tests share them, for each has processes of its own."""
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        library = probes.ensure(str(driver.libcuda))
        assert not library.failed
        yield probes
