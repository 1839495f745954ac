# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""BPF programs that only measure: where `make bpf` put them, or beside the product's own as a bundle has them."""

from __future__ import annotations

from pathlib import Path

from conformance.host import Host, Unavailable
from tools.harness.uprobes import MEASURING


def measuring_object(host: Host, name: str) -> Path:
    """Unavailable when it was not built."""
    for folder in (host.bpf_objects, MEASURING):
        if (folder / name).is_file():
            return folder / name
    raise Unavailable(f"{name} is neither in {host.bpf_objects} nor in {MEASURING}: run `make bpf`")
