# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MPS daemons in private folders: what they say, what their limits do, and what a client's end does to the others."""
