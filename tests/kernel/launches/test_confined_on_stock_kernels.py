# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What an agent may not resume it must not stop: signal 0 tells it, where AppArmor confines containers or the agent.

The profiles say of signals what those of Docker and containerd do: from what is unconfined, and from their own kind.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.booting import FLAGS, or_skip, stock_images
from tools.harness import stock_kernels

_SOURCE = Path(__file__).parent / "guest" / "confined.c"
_PROFILES = """\
profile container flags=(attach_disconnected,mediate_deleted) {
  file,
  capability,
  network,
  signal (receive) peer=unconfined,
  signal (send,receive) peer=container,
  ptrace (trace,read,tracedby,readby) peer=container,
}
profile agent flags=(attach_disconnected,mediate_deleted) {
  file,
  capability,
  network,
  signal,
  ptrace,
}
"""
_KERNELS = {"6.1": ((6, 1), (6, 2)), "6.12": ((6, 12), (6, 13))}
_OF_THE_AGENT = ("unconfined", "agent")
_STOPPED = "T"


@pytest.fixture(scope="module")
def consoles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kernel, what the guest wrote."""
    folder = tmp_path_factory.mktemp("guest")
    with or_skip():
        images = stock_images(tmp_path_factory.mktemp("archive"), _KERNELS.values())
        parser = stock_kernels.Archive(tmp_path_factory.mktemp("tools"), ["debian bookworm"]).package("apparmor")
    subprocess.run(["gcc", *FLAGS, "-o", folder / "guest", _SOURCE], check=True)
    (folder / "text").write_text(_PROFILES)
    features = parser / "etc/apparmor.d/abi/3.0"
    command = [str(parser / "sbin/apparmor_parser"), "-Q", "-K", "-S", "-M", str(features), str(folder / "text")]
    (folder / "profiles").write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    texts = stock_kernels.boot(images, stock_kernels.pack(folder, folder / "guest", [folder / "profiles"]))
    return dict(zip(_KERNELS, texts, strict=True))


def found(console: str) -> dict[tuple[str, str], tuple[bool, bool, str]]:
    """By sender and target: whether signal 0 and SIGCONT were allowed, and the target's state then."""
    lines = console.splitlines()
    assert "END" in lines, console[-2000:]
    words = [line.split() for line in lines if line.startswith((*_OF_THE_AGENT, "container"))]
    return {(one[0], one[1]): (one[2] == "1", one[3] == "1", one[4]) for one in words}


@pytest.mark.parametrize("kernel", _KERNELS)
def test_signal_0_is_allowed_where_sigcont_is_and_nowhere_else(consoles: dict[str, str], kernel: str) -> None:
    tried = found(consoles[kernel])
    assert len(tried) == 9
    for exists, continues, state in tried.values():
        assert exists == continues
        assert (state != _STOPPED) == continues


@pytest.mark.parametrize("kernel", _KERNELS)
def test_an_agent_that_is_confined_cannot_resume_a_container_and_one_that_is_not_can(
    consoles: dict[str, str], kernel: str
) -> None:
    tried = found(consoles[kernel])
    assert [tried[agent, "container"][1] for agent in _OF_THE_AGENT] == [True, False]
