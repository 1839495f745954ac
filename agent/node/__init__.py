# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The host at the edge: /proc, cgroups, ELF files, capabilities, pidfds, files of containers, HTTP over sockets."""
