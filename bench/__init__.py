# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The measured claims, each one command, and the real containers that benches, demo and tests run."""
