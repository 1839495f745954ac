# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every copy of libcuda is probed, and none twice: containers of one image share a file behind different mounts."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from agent.containers.gpu_processes import ProcessEvent
from agent.core.model import ProcessId
from agent.node.cgroups import parse_mounts
from agent.node.procfs import Procfs
from agent.probes.events import EventReader, FunctionNames
from agent.probes.libcuda import LibcudaProbes
from agent.probes.libraries import Layer, layer_paths
from tests.support.programs.driver import Driven, Driver, kernels, launched, lost, run_together
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

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
    fresh_probes: LibcudaProbes, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_seen: bool
) -> None:
    if not layers_seen:
        monkeypatch.setattr("agent.probes.libraries.layer_paths", lambda *_: [])
    image = tmp_path / "image"
    (image / "opt").mkdir(parents=True)
    shutil.copy(driver.libcuda, image / "opt" / "libcuda.so.1")
    with ExitStack() as stack:
        twins = []
        for number in range(2):
            twin = stack.enter_context(container(driver, image, tmp_path / "state", number))
            assert twin.stdout
            twins.append(Driven.of(twin.tgid, twin.stdin, twin.stdout))
            fresh_probes.ensure("/opt/libcuda.so.1", Procfs().process_id(twin.tgid))
        run_together(twins)
        for driven in twins:
            ((launches, _, _),) = launched(fresh_probes, driven.process).values()
            assert launches == THREADS * LAUNCHES
    assert len(fresh_probes.libraries()) == (1 if layers_seen else 2)
    assert (lost(fresh_probes).get("duplicate", 0) > 0) == (not layers_seen)


def test_the_same_file_through_two_paths_is_one_library(
    fresh_probes: LibcudaProbes, driver: Driver, tmp_path: Path
) -> None:
    link = tmp_path / "libcuda.so.1"
    if os.stat(driver.libcuda).st_dev == os.stat(tmp_path).st_dev:
        os.link(driver.libcuda, link)
    else:
        link.symlink_to(driver.libcuda)
    assert fresh_probes.ensure(str(driver.libcuda)) is fresh_probes.ensure(str(link))


def test_layers_are_found_in_the_order_in_which_they_cover_each_other() -> None:
    line = "40 30 0:50 / / rw - overlay overlay rw,lowerdir=/l1:/l2,upperdir=/up,workdir=/w"
    assert layer_paths(parse_mounts(line), "/usr/lib/libcuda.so.1") == [
        Layer("/up", "usr/lib/libcuda.so.1"),
        Layer("/l1", "usr/lib/libcuda.so.1"),
        Layer("/l2", "usr/lib/libcuda.so.1"),
    ]


def test_a_program_that_maps_a_library_just_written_over_meets_no_old_probe(
    fresh_probes: LibcudaProbes, driver: Driver, tmp_path: Path
) -> None:
    mine = replace(driver, libcuda=tmp_path / "libcuda.so.1")
    shutil.copyfile(driver.libcuda, mine.libcuda)
    newer = another_build(tmp_path / "newer")
    assert not fresh_probes.ensure(str(mine.libcuda)).failed
    reader = EventReader(fresh_probes, Deaf(), FunctionNames())
    reader.start()
    try:
        shutil.copyfile(newer, mine.libcuda)
        until(lambda: not fresh_probes.libraries(), "the probes of the old content to be detached", step_seconds=0.001)
        mine.run(f"{LAUNCHES}*launch:1x1x1:32x1x1")  # no scan has found it yet: it runs, unseen
        assert not fresh_probes.ensure(str(mine.libcuda)).failed
        seen = mine.run(f"{LAUNCHES}*launch:1x1x1:32x1x1")
    finally:
        reader.stop()
    assert {count for count, _, _ in launched(fresh_probes, seen.process).values()} == {LAUNCHES}


def another_build(folder: Path) -> Path:
    """The same functions at other places."""
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(BUILD / "plain" / "libcuda.so.1", folder))


class Deaf:
    """A listener that keeps nothing."""

    def seen(self, event: ProcessEvent) -> None:
        """Nothing."""

    def exited(self, process: ProcessId) -> None:
        """Nothing."""

    def replaced(self, process: ProcessId) -> None:
        """Nothing."""


def test_a_process_that_has_called_before_is_counted_after_its_library_is_reattached(
    fresh_probes: LibcudaProbes, driver: Driver, tmp_path: Path
) -> None:
    mine = replace(driver, libcuda=tmp_path / "libcuda.so.1")
    shutil.copyfile(driver.libcuda, mine.libcuda)
    before = fresh_probes.ensure(str(mine.libcuda))
    with mine.start("5*launch:1x1x1:32x1x1", "idle:5000", "7*launch:1x1x1:32x1x1") as driven:
        driven.begin()
        until(lambda: kernels(fresh_probes, driven.process) == 5, "the first launches")
        os.utime(mine.libcuda)  # as a package manager may do
        assert fresh_probes.ensure(str(mine.libcuda)) is before
        fresh_probes.drop(before)
        assert fresh_probes.ensure(str(mine.libcuda)) is not before
        driven.finish()
        assert kernels(fresh_probes, driven.process) == 12
    assert not lost(fresh_probes)
