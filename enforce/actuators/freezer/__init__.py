# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rung freeze: containers' cgroups, frozen and thawed."""
