# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVIDIA MPS: finding its control daemons, and speaking their two languages."""
