# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a real GPU says to all that design, simulator and agent take for granted: docs/on-a-real-gpu.md.

Not part of the product, which knows nothing of it. `python -m conformance` is the driver; needs nothing but the
standard library until an item asks for more, and what an item lacks is a row that says so.
"""
