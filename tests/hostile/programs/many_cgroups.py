# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Others are seen and counted as if it were not there: it makes cgroups below its own without end, and works in each.

    many_cgroups.py COUNT PROGRAM [ARGUMENT…]

In one of COUNT cgroups after another, all below the one that it is in, has PROGRAM use the GPU for a moment.
"""

import subprocess
import sys
from itertools import count
from pathlib import Path

_MOMENT_SECONDS = 0.05


def own() -> Path:
    """The cgroup of version 2 that this process is in."""
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    root = next(line.split()[1] for line in mounts if line.split()[2] == "cgroup2")
    return Path(root + line.removeprefix("0::"))


most, folder = int(sys.argv[1]), own()
for number in count():
    made = folder / f"cri-containerd-{number % most:064x}.scope"
    made.mkdir(exist_ok=True)
    process = subprocess.Popen(["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(made / "cgroup.procs"), *sys.argv[2:]])
    try:
        process.wait(_MOMENT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
