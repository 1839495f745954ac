# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An object that does not load: the error names the true cause in one line."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import ProbeError, SetupError
from agent.probes import libbpf_log
from agent.probes.libbpf_log import cause, load_error

# As libbpf 1.1 prints them.
REFUSED = [
    "libbpf: prog 'deny_alloc': BPF program load failed: Permission denied",
    "libbpf: prog 'deny_alloc': -- BEGIN PROG LOAD LOG --\n"
    "reg type unsupported for arg#0 function deny_alloc#12\n"
    "0: R1=ctx(off=0,imm=0) R10=fp0\n"
    "; ctx->ip = value;\n"
    "1: (7b) *(u64 *)(r1 +80) = r2\n"
    "invalid bpf_context access off=80 size=8\n"
    "processed 2 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0\n"
    "-- END PROG LOAD LOG --",
    "libbpf: prog 'deny_alloc': failed to load: -13",
    "libbpf: failed to load object 'bpf/build/deny.bpf.o'",
]
NO_MAP = [
    "libbpf: map 'calls': failed to create: Cannot allocate memory(-12)",
    "libbpf: failed to load object 'bpf/build/gpuwarden.bpf.o'",
]


@pytest.fixture(autouse=True)
def capable_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("agent.node.preflight.require_this_machine", lambda: None)
    libbpf_log.clear()
    yield
    libbpf_log.clear()


def keep(messages: list[str]) -> None:
    for message in messages:
        libbpf_log._keep(message)


def test_the_verifiers_last_line_is_the_cause_and_names_the_program() -> None:
    assert cause(REFUSED) == "program deny_alloc: invalid bpf_context access off=80 size=8"


def test_without_a_verifiers_log_libbpfs_last_specific_message_is_the_cause() -> None:
    assert cause(NO_MAP) == "map 'calls': failed to create: Cannot allocate memory(-12)"
    assert cause([]) == "libbpf gave no reason"


def test_a_refused_program_is_not_reported_as_an_old_kernel() -> None:
    keep(REFUSED)
    error = load_error(errno.EACCES)
    assert isinstance(error, ProbeError)
    assert "invalid bpf_context access off=80 size=8" in str(error)
    assert "5.15" not in str(error)
    assert "BTF" not in str(error)
    assert "gpuwarden --verbose doctor" in str(error)


def test_what_the_machine_lacks_is_the_cause_whatever_libbpf_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise SetupError("CAP_BPF is missing, for bpf(2)")

    monkeypatch.setattr("agent.node.preflight.require_this_machine", lacking)
    keep(REFUSED)
    error = load_error(errno.EPERM)
    assert isinstance(error, SetupError)
    assert str(error) == "BPF programs did not load: CAP_BPF is missing, for bpf(2)"


def test_a_refusal_with_all_capabilities_names_what_may_forbid_bpf() -> None:
    error = load_error(errno.EPERM)
    assert isinstance(error, SetupError)
    assert "seccomp" in str(error)


def test_a_map_without_memory_asks_for_memory() -> None:
    keep(NO_MAP)
    assert "map 'calls'" in str(load_error(errno.ENOMEM))
    assert "memory limit" in str(load_error(errno.ENOMEM))


@given(st.lists(st.text()), st.sampled_from([errno.EACCES, errno.EINVAL, errno.ENOMEM, errno.EPERM]))
def test_an_error_is_one_line_of_bounded_length(messages: list[str], code: int) -> None:
    keep([*messages, *REFUSED[:1], f"{REFUSED[1]}{'x' * 100_000}\x1b[2J\r"])
    text = str(load_error(code))
    assert text.isprintable()
    assert len(text) < 1000


def test_of_a_huge_log_beginning_and_end_are_kept() -> None:
    huge = REFUSED[1].replace("; ctx->ip = value;\n", "; ctx->ip = value;\n" * 100_000)
    keep([huge])
    assert sum(map(len, libbpf_log._kept.messages)) < 100_000
    assert cause(libbpf_log._kept.messages) == "program deny_alloc: invalid bpf_context access off=80 size=8"


def test_the_whole_log_is_in_the_debug_log_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keep(REFUSED[1:2])
    assert "1: (7b) *(u64 *)(r1 +80) = r2" in caplog.messages
    assert all(record.levelno == logging.DEBUG for record in caplog.records)
