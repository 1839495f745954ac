# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs that try to hurt others or to slip out by the public API, on a node with everything real but the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.node import Node, running_node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The simulated GPU, alone."""
    with running_node(tmp_path_factory.mktemp("node") / "n") as node:
        yield node
