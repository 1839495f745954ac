# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Label values, so that no two series are the same one and no name can grow without bound.

Containers that would share every label (two with one name in one namespace) are told apart by `id`, the first 12
characters of the runtime's id, which is empty otherwise. They are not summed: a sum would fall when one of them ends,
and two latencies cannot be summed at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from agent.model import Container, ContainerKey, Device
from agent.names import printable

LONGEST: Final = 200  # characters; runtimes allow more than anybody reads
SHORT_ID: Final = 12
THROUGH_A_PROCESS: Final = re.compile(r"^/proc/\d+/(root(?=/)|map_files/[^/]*)")

Labels = tuple[str, ...]


def container_labels(containers: Iterable[Container]) -> dict[ContainerKey, Labels]:
    """Values of catalog.CONTAINER for each container; distinct for distinct keys."""
    known = {container.key: container for container in containers}
    plain = {key: _plain(container) for key, container in known.items()}
    shared = Counter(plain.values())
    short = {key: container.id[:SHORT_ID] if shared[plain[key]] > 1 else "" for key, container in known.items()}
    labels = {key: (*plain[key], short[key]) for key in known}
    taken = Counter(labels.values())
    return {key: value if taken[value] == 1 else (*plain[key], text(key)) for key, value in labels.items()}


def device_labels(device: Device) -> Labels:
    """Values of catalog.DEVICE."""
    return str(device.index), device.uuid, device.pci_bus_id


def library_path(path: str) -> str:
    """The path as its container sees it: the pid through which the agent reaches it would be a new series each time."""
    return text(THROUGH_A_PROCESS.sub("", path))


def text(value: str | None) -> str:
    """A label value: bounded, and fit for whoever reads the scrape on a terminal."""
    return printable(value or "")[:LONGEST]


def _plain(container: Container) -> Labels:
    return tuple(map(text, (container.name, container.pod, container.namespace, container.runtime)))
