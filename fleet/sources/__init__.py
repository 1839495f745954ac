# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where slots and jobs come from: the agents' metrics in Prometheus, and pods as the API server lists them."""
