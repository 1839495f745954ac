# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The fleet: which offline job runs beside which online service. Knows nothing of the node agent but its metrics."""
