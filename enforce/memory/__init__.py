# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Memory promises: a quota for each offline container, and room that stays free for online ones.

The ladder is deny → hold → swap → evict. `accounts` says who has what, `planner` what follows (both pure), `bounds`
puts limits in force in the kernel, `waiting` is the guardian's: who is held at an allocation, and until when. What
cuMemGetInfo tells a program is not touched: it still sees the whole device.
"""
