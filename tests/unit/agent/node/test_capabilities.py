# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which capabilities are missing, by what is held and by the kernel; and that the list is the same everywhere."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import SetupError
from agent.node.preflight import ANY_KERNEL, CAPABILITIES, SINCE_6_6, held, line, missing, refusal, require_probes

ROOT = Path(__file__).parents[4]
OLD, NEW = (6, 1), (6, 6)
NAMES = sorted({one.name for one in CAPABILITIES})
kernels = st.sampled_from([(5, 15), OLD, NEW, (6, 18)])


def lost(names: tuple[str, ...], kernel: tuple[int, int]) -> set[str]:
    return {one.name for one in missing(names, kernel)}


@pytest.mark.parametrize("kernel", [(5, 15), OLD, NEW, (6, 18)])
def test_what_is_to_be_granted_on_any_kernel_is_enough_and_each_of_it_is_needed(kernel: tuple[int, int]) -> None:
    assert missing(ANY_KERNEL, kernel) == ()
    for name in ANY_KERNEL:
        assert name in lost(tuple(one for one in ANY_KERNEL if one != name), kernel)


def test_since_linux_6_6_only_freezing_is_lost_without_sys_admin_and_each_of_the_others_is_needed() -> None:
    [freezing] = missing(SINCE_6_6, NEW)
    assert freezing.name == "CAP_SYS_ADMIN"
    assert not freezing.required
    assert "freeze" in freezing.lost
    for name in SINCE_6_6:
        assert lost(tuple(one for one in SINCE_6_6 if one != name), NEW) == {"CAP_SYS_ADMIN", name}


def test_before_linux_6_6_nothing_works_without_sys_admin_which_is_all_that_is_asked_for() -> None:
    assert lost(SINCE_6_6, OLD) == {"CAP_SYS_ADMIN"}
    message = refusal(missing(SINCE_6_6, OLD))
    assert message is not None
    assert message.startswith("CAP_SYS_ADMIN is missing, for perf_event_open(2)")


def test_a_limit_for_nice_stands_in_for_sys_nice() -> None:
    names = tuple(name for name in ANY_KERNEL if name != "CAP_SYS_NICE")
    assert [one.name for one in missing(names, NEW, nice_limit=39)] == ["CAP_SYS_NICE"]
    assert missing(names, NEW, nice_limit=40) == ()
    assert missing(names, NEW, nice_limit=resource.RLIM_INFINITY) == ()


@given(st.sets(st.sampled_from(NAMES)), st.sampled_from(NAMES), kernels)
def test_one_more_capability_never_makes_more_missing(names: set[str], more: str, kernel: tuple[int, int]) -> None:
    assert set(missing(names | {more}, kernel)) <= set(missing(names, kernel))


@given(st.sets(st.sampled_from(NAMES)), kernels)
def test_it_ends_where_something_is_required_and_names_that(names: set[str], kernel: tuple[int, int]) -> None:
    lacking = missing(names, kernel)
    required = {one.name for one in lacking if one.required}
    if not required:
        require_probes(lacking, "6.18.0", Path("/"))
        return
    with pytest.raises(SetupError) as refused:
        require_probes(lacking, "6.18.0", Path("/"))
    assert all(name in str(refused.value) for name in required)


def test_each_line_names_the_capability_the_call_the_loss_and_the_cure() -> None:
    for one in CAPABILITIES:
        message = line(one)
        assert "\n" not in message
        assert all(part in message for part in (one.name, one.call, one.lost, "sudo", "docs/capabilities.md"))


def as_process(folder: Path, mask: int, uid_map: str = "0 0 4294967295") -> Path:
    (folder / "status").write_text(f"Name:\tx\nCapPrm:\t{0:016x}\nCapEff:\t{mask:016x}\nCapBnd:\t{2**41 - 1:016x}\n")
    (folder / "uid_map").write_text(f"  {uid_map}\n")
    return folder


def test_those_in_effect_count_and_in_a_user_namespace_none_does(tmp_path: Path) -> None:
    assert held(as_process(tmp_path, 0)) == frozenset()
    assert held(as_process(tmp_path, 1 << 5 | 1 << 39)) == {"CAP_KILL", "CAP_BPF"}
    assert held(as_process(tmp_path, 2**41 - 1)) == set(NAMES)
    assert held(as_process(tmp_path, 2**41 - 1, "0 100000 65536")) == frozenset()


def test_the_page_has_a_row_for_each_and_no_other() -> None:
    page = (ROOT / "docs/capabilities.md").read_text()
    rows = [f"| `{one.name}` | {one.call} | {one.lost} |" for one in CAPABILITIES]
    assert [row for row in page.split("\n") if re.match(r"\| `CAP_", row)] == rows
