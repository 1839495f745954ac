# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a trace says about its cluster, in the tables of Philly's paper (Jeon et al., ATC'19)."""
