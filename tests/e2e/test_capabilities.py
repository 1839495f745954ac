# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent with exactly the capabilities that it asks for, and with each of them taken away.

The work is another user's, and its libcuda lies where only that user can read: so each capability has something to do.
"""

from __future__ import annotations
