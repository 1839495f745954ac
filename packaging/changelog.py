#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`packaging/changelog.py --debian`, `--notes`, `--check`, `--released`: see shipping/announcement.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shipping.announcement import main

if __name__ == "__main__":
    sys.exit(main())
