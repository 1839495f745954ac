# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Man pages and completions, made from the parsers of the commands so that they cannot say anything else.

For whoever builds the documentation or a package; the product knows nothing of it.
"""
