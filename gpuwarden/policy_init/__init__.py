# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden policy init`: a first policy from the running containers, from answers or from flags.

`proposal` guesses, `questions` asks, `draft` writes, `command` puts them together.
"""
