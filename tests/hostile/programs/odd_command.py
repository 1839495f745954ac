# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Its container stays in its offline rule while the first program lives, and is reported when it leaves it.

    odd_command.py PROGRAM [ARGUMENT…]

Has PROGRAM use the GPU, and at each line on stdin goes on: starts it a second time under a command that no rule knows;
ends the first one; ends.
"""

import subprocess
import sys

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    first = subprocess.Popen([program, *arguments])
    print("first", first.pid, flush=True)
    sys.stdin.readline()
    odd = subprocess.Popen(["odd", *arguments], executable=program)
    print("odd", odd.pid, flush=True)
    sys.stdin.readline()
    first.kill()
    first.wait()
    print("ended", flush=True)
    sys.stdin.readline()
    odd.kill()
