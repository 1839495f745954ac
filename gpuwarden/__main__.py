# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m agent` is `gpuwarden`."""

from agent.main import main

main()
