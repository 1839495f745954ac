# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The simulated driver and those that no one here wrote: what ptxas and numba make is loaded, what is wrong is not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import frameworks
from tools.harness.node import Node, simulated_node

_TILE = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry tile(.param .u64 out) .maxntid 128, 1, 1
{
	.shared .align 4 .b8 part[1024];
	.reg .b64 %rd<2>;
	.reg .f32 %f<2>;
	ld.param.u64 %rd1, [out];
	ld.global.f32 %f1, [%rd1];
	st.shared.f32 [part], %f1;
	ret;
}
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    frameworks.skip_without()
    with simulated_node(tmp_path_factory.mktemp("gpu")) as node:
        yield node


@pytest.fixture
def tile(tmp_path: Path) -> Path:
    path = tmp_path / "tile.ptx"
    path.write_text(_TILE)
    return path


def run(node: Node, program: str, *arguments: str | Path) -> str:
    """What it prints; it has to succeed."""
    command = [frameworks.PYTHON, frameworks.PROGRAMS / program, *arguments]
    environment = {**os.environ, **node.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(node: Node, kernel: str, image: Path) -> Any:
    """What the driver says of the image and of a kernel in it."""
    return json.loads(run(node, "cuda_python_images.py", kernel, image))


@pytest.mark.parametrize("program", ["numba_features.py", "cuda_core_axpy.py"])
def test_what_programs_on_numba_and_cuda_python_use_succeeds(node: Node, program: str) -> None:
    assert run(node, program).splitlines()[-1] == "done"


def test_a_cubin_says_what_its_kernels_need(node: Node, tile: Path, tmp_path: Path) -> None:
    said = report(node, "tile", frameworks.cubin(tile, tmp_path / "tile.cubin"))
    assert 0 < said.pop("registers") < 32
    names = dict.fromkeys(("load", "load_library", "get", "get_kernel"), "CUDA_SUCCESS")
    assert said == {**names, "threads": 128, "shared_bytes": 1024, "arch": 90}


def test_ptx_says_how_large_its_blocks_may_be(node: Node, tile: Path) -> None:
    assert report(node, "tile", tile)["threads"] == 128


@pytest.mark.parametrize("compiled", [False, True], ids=["ptx", "cubin"])
def test_a_kernel_that_is_not_in_the_image_is_not_found(node: Node, tile: Path, tmp_path: Path, compiled: bool) -> None:
    image = frameworks.cubin(tile, tmp_path / "tile.cubin") if compiled else tile
    for absent in ("til", "tiles", "part", "_Z4tilePf"):
        said = report(node, absent, image)
        assert (said["get"], said["get_kernel"]) == ("CUDA_ERROR_NOT_FOUND",) * 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("-arch=sm_80",), "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (("-arch=sm_89",), "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (("-arch=sm_100",), "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (("-arch=sm_90", "-c"), "CUDA_ERROR_INVALID_IMAGE"),  # to be linked first
    ],
    ids=["sm_80", "sm_89", "sm_100", "relocatable"],
)
def test_a_cubin_that_is_not_for_this_gpu_is_refused(
    node: Node, tile: Path, tmp_path: Path, options: tuple[str, ...], error: str
) -> None:
    said = report(node, "tile", frameworks.cubin(tile, tmp_path / "tile.cubin", *options))
    assert said == {"load": error, "load_library": error}


def test_ptx_of_a_newer_toolkit_is_refused(node: Node, tile: Path) -> None:
    tile.write_text(_TILE.replace(".version 8.0", ".version 9.0"))
    error = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    assert report(node, "tile", tile) == {"load": error, "load_library": error}
