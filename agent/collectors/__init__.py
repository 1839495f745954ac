# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The sources of samples. Adding one is a file and a line in BUILTIN."""

from agent.collectors.devices import Uuids
from agent.collectors.launches import DeliverySamples, Launches
from agent.collectors.memory import Allocations, Copies
from agent.collectors.tenants import Tenants

BUILTIN = (Launches, Allocations, Copies, DeliverySamples, Uuids, Tenants)
