# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The snapshot's faces for machines. Each exporter reads snapshots and nothing else."""
