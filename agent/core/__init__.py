# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What everything else is built on: the model, errors, the clock, text, logs. Imports nothing of ours."""
