# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Containers that are left alone though somebody meant otherwise: each is logged once, and again for another reason.

The same reason is in the snapshot, and so in `gputop` and `gpuwarden plan`. Bounded by the containers that are here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from agent.model import ContainerKey
from agent.names import joined, printable
from enforce.roster import Seat

_log = logging.getLogger(__name__)


def tell(here: Mapping[ContainerKey, Seat], told: Mapping[ContainerKey, str]) -> dict[ContainerKey, str]:
    """Logs what is not in `told`; what is told by then: also of those that are well now, so that none flickers."""
    amiss = {key: seat.classification.reason for key, seat in here.items() if seat.classification.amiss}
    for key, reason in amiss.items():
        if told.get(key) != reason:
            it = here[key].container
            name = joined(it.namespace, it.pod, it.name)
            _log.warning("%s: %s", printable(name, 160), reason)
    return {key: reason for key, reason in {**told, **amiss}.items() if key in here}
