# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A pipeline of online services with one SLO end to end: which part of it each service gets."""
