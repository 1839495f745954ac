# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A policy out of a ConfigMap's volume, with real mounts: its directory is writable by all, and yet it is accepted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agent.core.errors import PolicyError
from enforce.policy.load import load
from enforce.reload import policy_file
from tests.support.processes import mounted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts")


def configmap(folder: Path) -> Path:
    """As the kubelet writes one: a directory that all may write, and links in it."""
    folder.mkdir(parents=True)
    (folder / "..2026_01_01").mkdir(mode=0o755)
    (folder / "..2026_01_01" / "policy.yaml").write_text("version: 1\n")
    (folder / "..2026_01_01" / "policy.yaml").chmod(0o644)
    (folder / "..data").symlink_to("..2026_01_01")
    (folder / "policy.yaml").symlink_to("..data/policy.yaml")
    folder.chmod(0o777)
    return folder / "policy.yaml"


VOLUME = "pods/0f7c/volumes/kubernetes.io~configmap/policy"  # in the kubelet's directory


def read_only(target: Path) -> None:
    subprocess.run(["mount", "-o", "remount,bind,ro", str(target)], check=True)


def test_a_configmap_is_taken_where_it_is_mounted_read_only_and_followed_when_it_changes(tmp_path: Path) -> None:
    volume, target = tmp_path / VOLUME, tmp_path / "etc with a space"
    configmap(volume)
    target.mkdir()
    file = policy_file(target / "policy.yaml")
    with mounted(str(volume), target, "--bind"):
        with pytest.raises(PolicyError, match=f"chmod go-w {target}"):
            file.load()
        read_only(target)
        assert file.load().enforce is False
        (volume / "..2026_01_02").mkdir(mode=0o755)
        (volume / "..2026_01_02" / "policy.yaml").write_text("version: 1\nenforce: true\n")
        (volume / "..data_tmp").symlink_to("..2026_01_02")
        os.rename(volume / "..data_tmp", volume / "..data")
        assert [file.changed(), file.changed()] == [False, True]
        assert file.load().enforce is True


@pytest.mark.parametrize("name", ["@etc", "pods/0f7c/volumes/kubernetes.io~empty-dir/policy", f"{VOLUME}/more"])
def test_any_other_directory_that_is_read_only_for_us_is_not_taken(tmp_path: Path, name: str) -> None:
    """Under ProtectSystem=strict every mount is: a subvolume, a directory that is bound elsewhere."""
    target = tmp_path / "etc"
    configmap(tmp_path / name)
    target.mkdir()
    with mounted(str(tmp_path / name), target, "--bind"):
        read_only(target)
        with pytest.raises(PolicyError, match=f"chmod go-w {target}"):
            load(target / "policy.yaml", strict_permissions=True)


def test_that_everything_is_read_only_for_us_makes_no_directory_safe(tmp_path: Path) -> None:
    """As under systemd's ProtectSystem=strict."""
    folder = tmp_path / "all" / "folder"
    folder.parent.mkdir()
    path = configmap(folder)
    with mounted(str(folder.parent), folder.parent, "--bind"):
        read_only(folder.parent)
        with pytest.raises(PolicyError, match=f"chmod go-w {folder}"):
            load(path, strict_permissions=True)
