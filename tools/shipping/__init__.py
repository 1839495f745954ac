# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a release consists of: its version, changes, parts and their licences; the image and the chart.

Run by the scripts in packaging/; the product knows nothing of it. Invariant: the same tree gives the same bytes.
"""
