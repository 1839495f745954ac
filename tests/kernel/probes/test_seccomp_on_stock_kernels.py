# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes under seccomp that are watched, on kernels as distributions ship them: the trial says which of them die.

What is booted (guest/seccomp.c) runs targets under a runtime's default profile, an allow-list of their own and strict
mode, and the agent's trial beside them. On some kernels all live, on others some die: both are right, if the trial says
so. Debian's have seccomp's exception for return probes by now, so one of them is booted without it, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.node import preflight
from agent.probes import return_probes
from tests.support.booting import FLAGS, or_skip
from tools.harness import stock_kernels

_SOURCE = Path(__file__).parent / "guest" / "seccomp.c"
_KERNELS = {"6.1": ((6, 1), (6, 2)), "6.12": ((6, 12), (6, 13)), "6.18": ((6, 18), (6, 19)), "7": ((7, 0), (8, 0))}
_DEADLY = "6.18 without seccomp's exception"
_THIS = "this machine's"
_TARGETS = ("none", "default", "default-enosys", "allow-list", "trap", "strict")
_CALLS = 5
_OBJECT = "uprobe.bpf.o"
_OUTCOME = re.compile(r"^(entry|entry-nop5|return|trial) (\S+) (-?\d+) (\d+)$", re.MULTILINE)
Outcomes = dict[tuple[str, str], tuple[int, int]]
"""(probes, target) → exit status or minus the signal, and how many returns were seen"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The targets. Beside it lie the trial and the BPF object."""
    folder = tmp_path_factory.mktemp("guest")
    program, trial = folder / "guest", folder / "trial"
    subprocess.run(["gcc", *FLAGS, "-o", program, _SOURCE, "-lbpf"], check=True)
    trial.write_bytes(return_probes.program())
    trial.chmod(0o755)
    shutil.copy(preflight.bpf_object().with_name(_OBJECT), folder)
    return program


@pytest.fixture(scope="module")
def guest(program: Path) -> Path:
    """An initial file system with them."""
    files = [program.with_name(name) for name in ("trial", _OBJECT)]
    return stock_kernels.pack(program.parent, program, files, str(return_probes.FUNCTION))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> stock_kernels.Archive:
    with or_skip():
        stock_kernels.require()
        return stock_kernels.Archive(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="module", params=[_THIS, *_KERNELS, _DEADLY])
def kernel(request: pytest.FixtureRequest) -> str:
    """_THIS, one of _KERNELS, or _DEADLY."""
    return str(request.param)


def _booted(kernel: str, archive: stock_kernels.Archive, guest: Path) -> str:
    with or_skip():
        image = archive.kernel(*_KERNELS[kernel.partition(" ")[0]])
        if kernel == _DEADLY:
            image = stock_kernels.without_seccomp_exception(image, guest.with_name("deadly"))
    (text,) = stock_kernels.boot([image], guest)
    return text


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, kernel: str, program: Path) -> Outcomes:
    """What it wrote on one kernel."""
    if kernel == _THIS:
        command = [str(program), str(program.parent), str(return_probes.FUNCTION)]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    else:
        text = _booted(kernel, request.getfixturevalue("archive"), request.getfixturevalue("guest"))
    lines = text.splitlines()
    assert "END" in lines, text
    assert not [line for line in lines if line.startswith("FAILED")], text
    print("\n".join(lines))
    found = _OUTCOME.findall(text)
    return {(probes, target): (int(status), int(returns)) for probes, target, status, returns in found}


def test_no_process_dies_of_a_probe_at_an_entry(outcomes: Outcomes, kernel: str) -> None:
    """But on a nop of five bytes where Linux (6.18) makes a call of it, if seccomp stops that."""
    for probes in ("entry",) if kernel == _DEADLY else ("entry", "entry-nop5"):
        assert {target: outcomes[probes, target] for target in _TARGETS} == dict.fromkeys(_TARGETS, (0, 0))


def test_a_process_without_seccomp_survives_return_probes_and_all_its_returns_are_seen(outcomes: Outcomes) -> None:
    assert outcomes["return", "none"] == (0, _CALLS)


def test_the_trial_says_whether_any_process_dies_of_a_return_probe(
    outcomes: Outcomes, kernel: str, record_property: Callable[[str, object], None]
) -> None:
    after = {target: outcomes["return", target] for target in _TARGETS}
    died = {target for target, (status, _) in after.items() if status}
    record_property("seccomp_dies", sorted(died))
    (strict, seen), (own, more_seen) = outcomes["trial", "strict"], outcomes["trial", "own"]
    danger = return_probes.danger_of((strict, own), seen + more_seen)
    assert (danger is not None) == bool(died), (after, danger)
    assert {"default", "allow-list"} <= died or kernel != _DEADLY, "a trial that never meets a death proves little"
    if danger is None:
        assert after == dict.fromkeys(_TARGETS, (0, _CALLS)), "who survives is seen, too"
    else:
        assert "ends at the return of a probed function" in danger
