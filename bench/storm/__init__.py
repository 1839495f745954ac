# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A storm of kills: the real agent is hurt at random moments, and every workload has to run on (`make storm`)."""
