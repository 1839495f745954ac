# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The usage ledger: who used how much of which device in which hour, kept on disk, and the report on it.

snapshot → meter (increments) → ledger (collects, writes) → store (SQLite) ← reading ← report
"""
