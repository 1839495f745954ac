# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The sources of samples. Adding one is a file and a line in BUILTIN."""

from agent.collectors.allocations import Allocations
from agent.collectors.copies import Copies
from agent.collectors.deliveries import Deliveries
from agent.collectors.launches import Launches
from agent.collectors.uuids import Uuids

BUILTIN = (Launches, Allocations, Copies, Deliveries, Uuids)
