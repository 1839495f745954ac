# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Man pages and completions, made from the parsers of the commands so that they cannot say anything else.

Run by `make docs` and `make site`; the product knows nothing of it.
"""
