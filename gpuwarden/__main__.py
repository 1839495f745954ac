# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m gpuwarden` is `gpuwarden`."""

from gpuwarden.main import main

main()
