# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden` on a machine where others simulate GPUs too: with probes on its node's own libcuda and no other.

The product looks for libcuda in every process, and rightly takes each process that uses one for a user of this node's
GPUs. On a machine with two simulated nodes that is wrong, and spoils the measurement of both.
"""

from __future__ import annotations

from unittest.mock import patch

from agent.probes.discovery import Discovery
from gpuwarden.main import main

if __name__ == "__main__":
    with patch.object(Discovery, "look"), patch.object(Discovery, "look_at"):
        main()
