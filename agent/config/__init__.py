# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Configuration files: only those that none but root can have written, as YAML with positions."""
