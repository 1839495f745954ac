# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every copy of libcuda is probed, and none twice: containers of one image share a file behind different mounts."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.libraries import layer_paths, parse_mounts
from agent.probes import Probes
from bench.containers import Container, Mount
from tests.kernel.driven import Driven, Driver, launched, lost, run_together

THREADS, LAUNCHES = 3, 23


def container(driver: Driver, image: Path, state: Path, number: int) -> Container:
    """One that runs the driver with its image's libcuda."""
    return Container.start(
        f"twin{number}",
        [str(driver.program), f"threads={THREADS}", f"{LAUNCHES}*launch:1x1x1:32x1x1"],
        {"LD_LIBRARY_PATH": "/opt", "GPUSIM_DIR": driver.node.environment["GPUSIM_DIR"]},
        cgroup_path=f"/docker/{secrets.token_hex(32)}",
        mounts=[Mount(driver.program), Mount(driver.node.folder, read_only=False)],
        overlay_lower=image,
        state=state,
    )


@pytest.mark.parametrize("layers_seen", [True, False], ids=["layers seen", "layers hidden"])
def test_two_containers_of_one_image_are_not_counted_twice(
    fresh_probes: Probes, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_seen: bool
) -> None:
    if not layers_seen:
        monkeypatch.setattr("agent.probes.layer_paths", lambda *_: [])
    image = tmp_path / "image"
    (image / "opt").mkdir(parents=True)
    shutil.copy(driver.libcuda, image / "opt" / "libcuda.so.1")
    with ExitStack() as stack:
        twins = []
        for number in range(2):
            twin = stack.enter_context(container(driver, image, tmp_path / "state", number))
            assert twin.stdout
            twins.append(Driven.of(twin.tgid, twin.stdin, twin.stdout))
            fresh_probes.ensure("/opt/libcuda.so.1", twin.tgid)
        run_together(twins)
        for driven in twins:
            ((launches, _, _),) = launched(fresh_probes, driven.process).values()
            assert launches == THREADS * LAUNCHES
    assert len(fresh_probes.libraries()) == (1 if layers_seen else 2)
    assert (lost(fresh_probes).get("duplicate", 0) > 0) == (not layers_seen)


def test_the_same_file_through_two_paths_is_one_library(fresh_probes: Probes, driver: Driver, tmp_path: Path) -> None:
    link = tmp_path / "libcuda.so.1"
    if os.stat(driver.libcuda).st_dev == os.stat(tmp_path).st_dev:
        os.link(driver.libcuda, link)
    else:
        link.symlink_to(driver.libcuda)
    assert fresh_probes.ensure(str(driver.libcuda)) is fresh_probes.ensure(str(link))


def test_layers_are_found_in_the_order_in_which_they_cover_each_other() -> None:
    line = "40 30 0:50 / / rw - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/up,workdir=/w"
    assert layer_paths(parse_mounts(line), "/usr/lib/libcuda.so.1") == [
        "/up/usr/lib/libcuda.so.1",
        "/l1/usr/lib/libcuda.so.1",
        "/l2/usr/lib/libcuda.so.1",
    ]
