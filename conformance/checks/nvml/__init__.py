# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the item `nvml` is made of: watching a load through NVML, and what that says of our assumptions."""
