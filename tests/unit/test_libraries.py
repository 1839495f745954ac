# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A file of a container's layer is known by the layer, also where the layers lie outside the agent's own container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.libraries import FileId, real_file

OVERLAY = FileId(77, 5)


@pytest.fixture
def seen(tmp_path: Path) -> os.stat_result:
    """What the file looks like through the overlay: other numbers, the same size and time."""
    layer = tmp_path / "node/snapshots/9/fs"
    layer.mkdir(parents=True)
    (layer / "libcuda.so.1").write_bytes(b"x" * 100)
    os.utime(layer / "libcuda.so.1", ns=(0, 5_000_000_000))
    return facts(size=100, mtime=5)


def facts(size: int, mtime: int) -> os.stat_result:
    told = (0o100644, OVERLAY.inode, OVERLAY.device, 1, 0, 0, size, mtime, mtime, mtime)
    return os.stat_result(told, {"st_mtime_ns": mtime * 1_000_000_000})


def real(path: Path) -> FileId:
    found = path.stat()
    return FileId(found.st_dev, found.st_ino)


def test_layers_that_only_the_node_sees_are_looked_for_there(seen: os.stat_result, tmp_path: Path) -> None:
    layers = ["/snapshots/8/fs/libcuda.so.1", "/snapshots/9/fs/libcuda.so.1"]
    found = real_file(seen, layers, str(tmp_path / "node"))
    assert found == real(tmp_path / "node/snapshots/9/fs/libcuda.so.1")


def test_a_layer_that_is_seen_from_here_comes_first(seen: os.stat_result, tmp_path: Path) -> None:
    here = tmp_path / "node/snapshots/9/fs/libcuda.so.1"
    assert real_file(seen, [str(here)], "/nowhere") == real(here)


@pytest.mark.parametrize("layer", ["snapshots/9/fs/libcuda.so.1", "/snapshots/7/fs/libcuda.so.1"])
def test_where_no_layer_has_it_the_file_keeps_its_own_numbers(seen: os.stat_result, layer: str, tmp_path: Path) -> None:
    assert real_file(seen, [layer], str(tmp_path / "node")) == OVERLAY


def test_another_file_of_that_name_is_not_taken_for_it(seen: os.stat_result, tmp_path: Path) -> None:
    layers = ["/snapshots/9/fs/libcuda.so.1"]
    assert real_file(facts(size=101, mtime=5), layers, str(tmp_path / "node")) == OVERLAY
    assert real_file(facts(size=100, mtime=6), layers, str(tmp_path / "node")) == OVERLAY
