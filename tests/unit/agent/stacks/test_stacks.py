# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Stacks as values: choosing the container, naming, folding."""

from __future__ import annotations

import json

import pytest

from agent.core.errors import GoneError, WardenError
from agent.core.model import Container, ContainerKey
from agent.stacks.output import StackReport, as_json, folded, merge
from agent.stacks.sampler import choose, with_caller
from agent.stacks.symbolizer import Modules
from gpuwarden.stacks import drawn

_MAPS = """\
00400000-00500000 r-xp 00001000 08:01 7 /srv/my app/train
7f0000000000-7f0000100000 r--p 00000000 08:01 8 /lib/libcuda.so.1
7f0000100000-7f0000200000 r-xp 00100000 08:01 8 /lib/libcuda.so.1
"""


def report(values: dict[tuple[str, ...], int], kind: str = "launch", **tallies: int) -> StackReport:
    return StackReport("chat", kind, 10.0, values, tallies)


def container(name: str, id_: str, pod: str | None = None) -> Container:
    return Container(ContainerKey(f"docker:{id_}"), name, "docker", id_, pod, cgroup=f"/docker/{id_}")


ONE, TWO = container("chat", "abcd" * 16, "chat-0"), container("training", "abce" * 16)


@pytest.mark.parametrize("name", ["chat", "docker:" + "abcd" * 16, "abcd" * 16, "abcda", "chat-0"])
def test_a_container_is_found_by_name_key_id_prefix_or_pod(name: str) -> None:
    assert choose(name, [ONE, TWO]) == ONE


def test_an_exact_name_wins_over_the_beginning_of_an_id() -> None:
    named = container("abce", "1234" * 16)
    assert choose("abce", [named, TWO]) == named


def test_an_unknown_container_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(WardenError, match=r"is called web.*chat \(docker:abcd.*training \(docker:abce"):
        choose("web", [ONE, TWO])


def test_an_ambiguous_container_is_refused_with_its_candidates() -> None:
    with pytest.raises(WardenError, match=r"more than one.*docker:abcd.*docker:9999"):
        choose("chat", [ONE, TWO, container("chat", "9999" * 16)])


def test_too_short_a_beginning_of_an_id_means_nothing() -> None:
    with pytest.raises(WardenError, match="is called abc;"):
        choose("abc", [ONE])


def test_the_list_of_candidates_is_bounded() -> None:
    many = [container(f"c{number}", f"{number:064x}") for number in range(500)]
    with pytest.raises(WardenError, match="and 480 more") as error:
        choose("web", many)
    assert len(str(error.value)) < 4000


def test_the_caller_that_old_kernels_leave_out_is_put_in() -> None:
    assert with_caller([1, 3], 2) == [1, 2, 3]
    assert with_caller([1, 2, 3], 2) == [1, 2, 3]
    assert with_caller([1, 3], 0) == [1, 3]


def test_modules_are_named_with_the_offset_in_their_file() -> None:
    modules = Modules(lambda _: _MAPS)
    assert modules.name(1, 0x400010) == "train+0x1010"
    assert modules.name(1, 0x7F0000100020) == "libcuda.so.1+0x100020"
    assert modules.name(1, 0x7F0000000020) is None  # not code
    assert modules.name(1, 0x10) is None


def test_modules_of_a_process_that_ended_are_still_known() -> None:
    texts = iter([_MAPS])

    def read(_: int) -> str:
        for text in texts:
            return text
        raise GoneError("ended")

    modules = Modules(read)
    assert modules.name(1, 0x400010) == "train+0x1010"
    modules.renew()
    assert modules.name(1, 0x10) is None
    assert modules.name(1, 0x400010) == "train+0x1010"


def test_stacks_of_one_name_are_added_up() -> None:
    assert merge([(("a", "b"), 1), (("a",), 5), (("a", "b"), 2), (("c",), 0)]) == {("a",): 5, ("a", "b"): 3}


def test_a_separator_in_a_name_forges_no_frame() -> None:
    assert folded(report({("a;b", "c"): 3})) == "a:b;c 3\n"


@pytest.mark.parametrize(("launches", "every"), [(0, 1), (50, 1), (5000, 100), (25_000, 500)])
def test_as_many_launches_are_drawn_as_keep_to_the_limit(launches: int, every: int) -> None:
    assert drawn(launches) == every


def test_the_headline_reports_what_was_lost() -> None:
    line = report({("a",): 7}, seen=9, sampled=7, collision=2).headline
    assert line == "chat: launch stacks over 10.0 s, 7 samples of 9 calls, 7 launches; lost: collision 2"


def test_a_program_without_frame_pointers_is_reported_as_such() -> None:
    assert any("frame pointers" in note for note in report({("p", "caller", "cuLaunchKernel"): 7}).notes())
    assert report({("p", "main", "step", "cuLaunchKernel"): 7}).notes() == []


def test_live_allocations_say_what_is_not_in_them() -> None:
    assert any("before" in note for note in report({("p", "a", "b", "c"): 7}, "alloc").notes())


def test_json_has_the_frames_as_they_are() -> None:
    document = json.loads(as_json(report({("a;b", "c"): 3}, "alloc", seen=1)))
    assert document["stacks"] == [{"frames": ["a;b", "c"], "value": 3}]
    assert (document["unit"], document["tallies"]) == ("bytes", {"seen": 1})
