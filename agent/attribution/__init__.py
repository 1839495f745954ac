# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs that use the GPU through the plain driver API, and are held, saved and ended while they do."""
