# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a release says of itself: its version, what changed, what is in it and under which licences.

For whoever makes a package; the product knows nothing of it. Invariant: the same tree gives the same bytes.
"""
