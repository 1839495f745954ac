# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Real containers by runc, and the image of busybox for the runtimes that want one."""

from tools.harness.containers.container import Container, sweep
from tools.harness.containers.oci_bundle import Mount
from tools.harness.containers.runc import ContainerError

__all__ = ["Container", "ContainerError", "Mount", "sweep"]
