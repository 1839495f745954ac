# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden policy init`: a first policy, from what runs now (`proposal`), from answers or flags, in words.

`proposal` guesses, `questions` asks, `draft` writes, `command` puts them together.
"""
