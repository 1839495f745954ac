# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The manifests: judged (check), and tried on a real Kubernetes (life)."""
