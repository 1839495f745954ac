# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Mountinfo is parsed in one place: mounts, and the cgroup hierarchies among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.node.cgroups import Hierarchy, Mount, hierarchies, parse_mounts

HYBRID = (
    "30 20 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "31 20 0:27 /docker/x /somewhere rw - cgroup2 cgroup2 rw\n"
    "34 20 0:30 / /sys/fs/cgroup/freezer rw,nosuid - cgroup cgroup rw,freezer\n"
    "32 20 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
    "33 20 0:29 / /proc rw - proc proc rw\n"
)


def test_hierarchies_that_are_mounted_whole_count_and_v2_comes_first() -> None:
    assert hierarchies(parse_mounts(HYBRID)) == [
        Hierarchy(2, "/sys/fs/cgroup/unified", has_freezer=True),
        Hierarchy(1, "/sys/fs/cgroup/memory", has_freezer=False),
        Hierarchy(1, "/sys/fs/cgroup/freezer", has_freezer=True),
    ]


def test_a_controller_whose_name_contains_freezer_is_not_the_freezer() -> None:
    [named] = hierarchies(parse_mounts("30 20 0:26 / /x rw - cgroup cgroup rw,name=freezer\n"))
    assert not named.has_freezer


def test_options_of_the_mount_and_of_the_file_system_are_kept_apart() -> None:
    [mount] = parse_mounts("36 35 98:0 /a /b ro,noatime master:1 shared:2 - ext4 /dev/root rw,errors=continue\n")
    assert mount == Mount("/b", "/a", "ext4", "ro,noatime", "rw,errors=continue")


def test_paths_are_unescaped() -> None:
    [mount] = parse_mounts("36 35 98:0 /with\\011tab /my\\040disk\\134x rw - ext4 /dev/root rw\n")
    assert (mount.root, mount.point) == ("/with\ttab", "/my disk\\x")


def test_white_space_that_the_kernel_does_not_escape_ends_no_field() -> None:
    [mount] = parse_mounts("36 35 98:0 / /x\u00a0/\x0b/\r/y rw - cgroup2 none rw\n")
    assert mount.point == "/x\u00a0/\x0b/\r/y"


def test_a_file_system_without_a_source_is_not_skipped() -> None:
    assert parse_mounts("36 35 98:0 / /x rw - cgroup2  rw\n") == [Mount("/x", "/", "cgroup2", "rw", "rw")]


@given(st.text())
def test_malformed_lines_are_skipped(text: str) -> None:
    hierarchies(parse_mounts(text))
    assert parse_mounts(f"{text.replace(' - ', ' ')}\n{HYBRID}")[-5:] == parse_mounts(HYBRID)
