# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""It is frozen under its rule all the same: the name of a process says nothing of what it is.

    called_runc.py NAME PROGRAM [ARGUMENT…]

Calls itself as container runtimes are called, which others depend on, and has PROGRAM use the GPU.
"""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    Path("/proc/self/comm").write_text(sys.argv[1])
    sys.exit(subprocess.call(sys.argv[2:]))
