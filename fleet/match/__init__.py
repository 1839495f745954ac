# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The plan: types of slots and jobs, the exact matching of them, its certificate, and the baselines beside it."""
