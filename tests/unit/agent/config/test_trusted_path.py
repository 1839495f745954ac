# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The owners of the directories that lead to a file which decides what the agent does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.config.trusted_file import exposed_path
from agent.core.errors import PolicyError
from enforce.policy.load import check_file, load

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
STRANGER = 65534


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir(mode=0o755)
    file = folder / "policy.yaml"
    file.write_text("version: 1\n")
    file.chmod(0o644)
    return file


def refusal(path: Path) -> str:
    with pytest.raises(PolicyError) as error:
        load(path, strict_permissions=True)
    return str(error.value)


def test_a_file_of_ours_in_folders_of_ours_is_taken(policy: Path) -> None:
    assert exposed_path(policy) is None
    assert load(policy, strict_permissions=True).enforce is False


@pytest.mark.parametrize(("mode", "writers"), [(0o777, "every user"), (0o775, "its group"), (0o757, "every user")])
def test_a_folder_that_others_write_is_refused_with_the_cure(policy: Path, mode: int, writers: str) -> None:
    policy.parent.chmod(mode)
    message = refusal(policy)
    assert f"{policy}:1: lies in {policy.parent}, where {writers} could put another file" in message
    assert f"chmod go-w {policy.parent}" in message


def test_so_is_a_folder_further_up(policy: Path) -> None:
    policy.parent.parent.chmod(0o777)
    assert f"chmod go-w {policy.parent.parent}" in refusal(policy)
    policy.parent.parent.chmod(0o700)
    assert exposed_path(policy) is None


@ROOT_ONLY
def test_a_directory_of_another_user_is_refused_whatever_its_mode(policy: Path) -> None:
    os.chown(policy.parent, STRANGER, -1)
    assert f"belongs to user {STRANGER}" in refusal(policy)
    assert f"chown {policy.parent} to root" in refusal(policy)


@ROOT_ONLY
def test_in_a_folder_with_the_sticky_bit_each_may_have_his_own(policy: Path) -> None:
    policy.parent.chmod(0o1777)
    assert exposed_path(policy) is None
    theirs = policy.with_name("theirs.yaml")
    theirs.symlink_to(policy)
    os.chown(theirs, STRANGER, -1, follow_symlinks=False)
    assert f"lies in {policy.parent}, where every user" in (exposed_path(theirs) or "")


def test_a_link_is_judged_by_where_it_lies_and_by_the_way_to_what_it_names(policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    link = other / "policy.yaml"
    link.symlink_to("../etc/policy.yaml")
    assert load(link, strict_permissions=True).enforce is False
    policy.parent.chmod(0o777)
    assert f"lies in {policy.parent}," in refusal(link)
    policy.parent.chmod(0o755)
    other.chmod(0o777)
    assert f"lies in {other}," in refusal(link)


def test_links_that_go_round_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        exposed_path(tmp_path / "a")
    assert "cannot be read" in refusal(tmp_path / "a")


def test_a_path_is_taken_from_the_working_directory(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(policy.parent)
    assert exposed_path("policy.yaml") is None
    assert exposed_path("../etc/./policy.yaml") is None
    policy.parent.chmod(0o777)
    assert exposed_path("policy.yaml") is not None


def test_a_check_of_a_file_warns_and_does_not_refuse(policy: Path) -> None:
    policy.parent.chmod(0o777)
    checked = check_file(policy)
    assert checked.value is not None
    assert checked.exposed is not None
    assert "lies in" in checked.exposed
