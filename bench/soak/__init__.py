# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Hours of work and of containers that come and go: nothing may grow, and no figure may drift."""
