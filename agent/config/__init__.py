# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page: what gputop shows, for whoever has only a browser. Read-only, one page, nothing from elsewhere."""
