# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the fleet's parts are worth, by published traces and tables; needs neither a GPU nor a cluster."""
