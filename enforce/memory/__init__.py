# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Memory limits: a quota for each offline container, and room that stays free for online ones.

The ladder is deny → hold → swap → evict. `view` and `accounts` say how much each container has, `planner` what follows
(all pure), `quotas` puts limits in force in the kernel, `controller` is one decision of all this; `allocation_queue` is
the guardian's: which processes are held at an allocation, and until when. What cuMemGetInfo reports to a program is not
changed: it still sees the whole device.
"""
