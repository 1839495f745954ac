# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What happens on the GPU while a process stands still: ways to hold one, and what the records of its work say."""
