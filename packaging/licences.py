#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`packaging/licences.py TREE DEST`: licence texts of an installed tree, gathered in DEST; see shipping/licences.py."""

from environment import run

if __name__ == "__main__":
    run("shipping.licences")
