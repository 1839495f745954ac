#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`packaging/sbom.py TREE`: the parts of an installed tree, CycloneDX on stdout; see shipping/sbom.py."""

from environment import run

if __name__ == "__main__":
    run("shipping.sbom")
