# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Copies between host and device: how exactly they are shared, and what an online one waits for."""
