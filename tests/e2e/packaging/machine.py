# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A machine of its own: systemd as PID 1 in a runc container that sees cgroup v2 alone, with this machine's programs.

Its root is an overlay on ours that lies in memory; what happens in it, this machine does not keep. The product is in
/usr/bin/gpuwarden, as a package would put it, and runs from this checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.node import ROOT
from tools.harness import cgroups
from tools.harness.wait import until

CHECKOUT, PACKAGES, PYTHON = "/opt/gpuwarden", "/opt/packages", "/opt/python"  # which may lie in a home here
_TARGET = "machine.target"
_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("SYS_CHROOT", "SYS_ADMIN", "SYS_PTRACE", "SYS_NICE", "MKNOD", "SETFCAP", "BPF", "PERFMON", "CHECKPOINT_RESTORE"),
)
HOME = "/usr/lib/gpuwarden"  # an environment as the package brings it, but for its libraries
_PROGRAM = f"#!{HOME}/bin/python3\nfrom gpuwarden.main import main\nmain()\n"
_ENVIRONMENT = {
    f"{HOME}/pyvenv.cfg": f"home = {PYTHON}/bin\n",
    f"{HOME}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/product.pth": (
        f"{CHECKOUT}\n{PACKAGES}\n"
    ),
    "/usr/bin/gpuwarden": _PROGRAM,
}
# runc is to find one hierarchy, as on a machine that has no other.
_V2_ONLY = """\
mount --make-rprivate / && umount --lazy /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Commands in it, and its files as they look from here."""

    init: int  # its PID 1, as we count

    @property
    def root(self) -> Path:
        """Its files, those in memory included."""
        return Path(f"/proc/{self.init}/root")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """To its end. Not by `runc exec`, which would look for the container in the hierarchies that we see."""
        return subprocess.run(
            ["nsenter", f"--target={self.init}", "--all", "--", *command],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def systemctl(self, *arguments: str) -> None:
        """Has to succeed."""
        done = self.run("systemctl", *arguments)
        assert done.returncode == 0, f"systemctl {' '.join(arguments)}: {done.stderr}{self.journal()}"

    def show(self, unit: str, *names: str) -> list[str]:
        """The values of these properties."""
        lines = self.run("systemctl", "show", f"--property={','.join(names)}", unit).stdout.splitlines()
        values = {name: value for name, _, value in (line.partition("=") for line in lines)}
        return [values.get(name, "") for name in names]

    def journal(self, unit: str = "gpuwarden") -> str:
        """The log of the unit, with systemd's own lines about it."""
        return self.run("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of root's."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)


@contextmanager
def machine(name: str, folder: Path, files: Mapping[str, str]) -> Iterator[Machine]:
    """Up and running, with these files; gone afterwards."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder], check=True)
    try:
        _make_root(folder, files)
        (folder / "config.json").write_text(json.dumps(_config(name)))
        with _running(name, folder) as made:
            yield made
    finally:
        subprocess.run(["umount", "--lazy", folder / "rootfs"], check=False)
        subprocess.run(["umount", "--lazy", folder], check=True)
        folder.rmdir()


@contextmanager
def _running(name: str, folder: Path) -> Iterator[Machine]:
    command = ["unshare", "--mount", "sh", "-c", _V2_ONLY, "sh", *_runc(folder), "run", "--detach"]
    with (folder / "console").open("wb") as console:
        done = subprocess.run(
            [*command, "--bundle", str(folder), "--pid-file", str(folder / "pid"), name],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0, (folder / "console").read_text(errors="replace")
    made = Machine(int((folder / "pid").read_text()))
    try:
        until(lambda: made.run("systemctl", "is-active", _TARGET).stdout == "active\n", "the machine to be up")
        yield made
    finally:
        subprocess.run([*_runc(folder), "delete", "--force", name], check=False, capture_output=True, timeout=60)
        cgroups.empty(f"/{name}")
        cgroups.remove(f"/{name}", ())


def _runc(folder: Path) -> list[str]:
    return ["runc", "--root", str(folder / "runc")]


def _make_root(folder: Path, files: Mapping[str, str]) -> None:
    for part in ("upper", "work", "rootfs"):
        (folder / part).mkdir()
    options = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
    root = folder / "rootfs"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "machine", root], check=True)
    for ours in (HOME, "/etc/systemd/system", "/etc/fstab", "/etc/gpuwarden", "/var/lib/gpuwarden", "/var/log/journal"):
        _remove(root / ours.lstrip("/"))
    with (root / "etc/group").open("a") as groups:
        groups.write("gpuwarden:x:64998:\n")
    python = root / HOME.lstrip("/") / "bin/python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(f"{PYTHON}/bin/{Path(os.path.realpath(sys.executable)).name}")
    for path, text in {**files, **_ENVIRONMENT, f"/etc/systemd/system/{_TARGET}": _UNIT}.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if path.startswith("/usr/bin/") else 0o644)


_UNIT = "[Unit]\nDescription=All that is needed\nRequires=basic.target\nAfter=basic.target\n"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _config(name: str) -> dict[str, Any]:
    """Source: OCI runtime specification 1.0.2."""
    names = [f"CAP_{one}" for one in _CAPABILITIES]
    in_memory = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=755"]}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/lib/systemd/systemd", f"--unit={_TARGET}", "--log-target=journal", "--show-status=0"],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "container=runc"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), names),
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "machine",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", **in_memory, "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", **in_memory, "options": ["nosuid", "nodev", "mode=1777"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["rw"]},
            {"destination": "/run", **in_memory},
            {"destination": "/tmp", **in_memory, "options": ["nosuid", "nodev", "mode=1777"]},
            _bind(ROOT, CHECKOUT),
            _bind(Path(sysconfig.get_path("purelib")), PACKAGES),
            _bind(Path(sys.base_prefix), PYTHON),
        ],
        "linux": {
            "cgroupsPath": f"/{name}",
            "resources": {},
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup", "network")],
        },
    }


def _bind(source: Path, target: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", "ro"]}
