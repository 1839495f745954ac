# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page: what gputop shows, in a browser. Read-only, one page, nothing from elsewhere."""
