# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""BPF programs that only measure: where `make bpf` put them, or beside the product's own as a bundle has them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agent.core.errors import ProbeError
from agent.probes.libbpf import BpfObject
from conformance.host import Host, Unavailable

_BUILT: Final = Path(__file__).resolve().parents[3] / "build" / "bpf"


def measuring_object(host: Host, name: str) -> Path:
    """Unavailable when it was not built."""
    for folder in (host.bpf_objects, _BUILT):
        if (folder / name).is_file():
            return folder / name
    raise Unavailable(f"{name} is neither in {host.bpf_objects} nor in {_BUILT}: run `make bpf`")


def loaded(path: Path, program: str) -> tuple[BpfObject, bool]:
    """The object, and whether its program is for uprobe_multi links, as where the kernel has them. ProbeError."""
    try:
        return BpfObject(path, multi={program}), True
    except ProbeError:
        return BpfObject(path), False
