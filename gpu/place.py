# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Makes an item's Here, and takes it away: whatever was started ends, the scratch folder goes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from gpu.here import Here, path_with_control
from gpu.look import ROOT, SIM_BUILD, Look, item_environment

PYTHON_VARIABLE: Final = "GPUWARDEN_GPU_PYTHON"


@contextmanager
def place(look: Look, folder: Path, *, quick: bool, seconds: float) -> Iterator[Here]:
    """`folder` is made, and removed in the end. Where simulated, with a simulated GPU of this item's own in it."""
    folder.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            node, environment = _node(stack, folder) if look.simulated else (None, {})
            environment = {**environment, **item_environment(look), "PATH": path_with_control()}
            os.environ.update(environment)  # for what the item itself loads
            here = Here(
                simulated=look.simulated,
                quick=quick,
                folder=folder,
                libcuda=_path(look.libcuda),
                libnvml=_path(look.libnvml),
                workloads=SIM_BUILD / "bin",
                bpf_objects=ROOT / "bpf" / "build",
                bpf=look.bpf,
                python=os.environ.get(PYTHON_VARIABLE) or sys.executable,
                environment=environment,
                node=node,
                seconds=seconds,
            )
            stack.callback(here.end_all)
            yield here
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _node(stack: ExitStack, folder: Path) -> tuple[Any, Mapping[str, str]]:
    from bench.node import simulated_node

    node = stack.enter_context(simulated_node(folder / "gpu"))
    return node, node.environment


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
