# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Seeing cgroups as the node does, also from inside a container.

Where cgroups are v2, runtimes give each container a cgroup namespace of its own, and Kubernetes has a way out of that
for privileged ones only. From there other containers' paths begin with "/..", what they have in common with ours left
out, and no hierarchy looks mounted whole: nothing could be frozen. So the agent joins the node's namespace. Nothing but
the view changes: it stays in its cgroup, within its limits. Source: setns(2), cgroup_namespaces(7).
"""

from __future__ import annotations

import ctypes
import logging
import os

_log = logging.getLogger(__name__)
_CLONE_NEWCGROUP = 0x02000000
_OURS = "/proc/thread-self/ns/cgroup"
_FIRST = "cgroup:[4026531835]"  # the kernel's own (PROC_CGROUP_INIT_INO)


def join_the_nodes() -> bool:
    """For this thread, and those that it starts from now on. False where that fails; the log says what is lost."""
    try:
        theirs = _of_the_node()
        if os.readlink(theirs) != os.readlink(_OURS):
            _join(theirs)
    except OSError as error:
        cure = "give it CAP_SYS_ADMIN and CAP_SYS_PTRACE, or the node's cgroup namespace"
        _log.warning(
            "cgroups are seen from inside the agent's container (%s): nothing is frozen; %s", error.strerror, cure
        )
        return False
    return True


def _of_the_node() -> str:
    """PID 1's; where nobody may look at PID 1, that of the first kernel thread, which is the kernel's own."""
    init, kernel_thread = "/proc/1/ns/cgroup", "/proc/2/ns/cgroup"
    try:
        os.readlink(init)
    except PermissionError:
        if os.readlink(kernel_thread) == _FIRST:
            return kernel_thread
        raise
    return init


def _join(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWCGROUP):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
