# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The initial file system of a machine: a small Debian with Python, a compiler and runc, and this tree with its tests.

Debian's part and the Python packages are made once and kept; the tree is as it is now. Nothing is executed of what is
unpacked, so it may be for another architecture.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.harness.stock_kernels import Archive

_ROOT: Final = Path(__file__).resolve().parents[2]
_SUITE: Final = "debian bookworm"
_PACKAGES: Final = (
    *("bash", "busybox-static", "coreutils", "findutils", "gcc", "grep", "libbpf-dev", "libc6-dev", "libelf1"),
    *("make", "mount", "procps", "python3", "runc", "sed", "util-linux"),
)
_TESTING: Final = (
    *("container-runtime-interface-api", "grpcio", "hypothesis", "pytest", "pytest-rerunfailures", "pytest-xdist"),
)
_MERGED: Final = ("bin", "lib", "lib64", "sbin")
_USELESS: Final = (
    *("usr/share/doc", "usr/share/i18n", "usr/share/info", "usr/share/locale", "usr/share/man", "usr/share/perl"),
    *("usr/lib/*/perl*", "usr/lib/*/gconv", "usr/lib/gcc/*/*/lto*", "usr/lib/gcc/*/*/plugin", "usr/lib/*/lib*san*"),
)
_SOURCES: Final = (
    *("agent", "bench", "bpf", "conformance", "enforce", "gpuwarden", "packaging", "pyproject.toml", "sim", "tests"),
    "tools",
)
_BUILT: Final[Mapping[str, Mapping[str, str]]] = {  # the simulated GPU of another architecture is built there
    "amd64": {name: name for name in ("bpf/build", "build/bpf", "build/harness", "sim/build")},
    "arm64": {"bpf/build/arm64": "bpf/build", "build/bpf/arm64": "build/bpf"},
}
_WHEELS: Final[Mapping[str, Sequence[str]]] = {
    "amd64": (),
    "arm64": tuple(f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_28", "_2_34")),
}
_BEFORE_ROOT: Final = """\
#!/bin/busybox sh
busybox mkdir /new
busybox mount -t tmpfs -o size=90% root /new
busybox cp -a /bin /etc /lib /lib64 /packages /root /sbin /usr /warden /init-in-root /new/
busybox mkdir /new/dev /new/proc /new/run /new/sys /new/tmp /new/var
exec busybox switch_root /new /init-in-root
"""  # runc changes the root of a container, which the first file system of a machine does not let it
_INIT: Final = """\
#!/bin/bash
export PATH=/packages/bin:/usr/bin:/usr/sbin HOME=/root
mount -t proc p /proc
mount -t sysfs s /sys
mount -t devtmpfs d /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs s /dev/shm
mount -t devpts p /dev/pts
mount -t tracefs t /sys/kernel/tracing
mount -t bpf b /sys/fs/bpf
mount -t tmpfs r /run
mount -t tmpfs t /tmp
busybox ifconfig lo 127.0.0.1 up
root=/sys/fs/cgroup
read -r line </proc/cmdline
case $line in
*cgroups=v2*)
	mount -t cgroup2 c $root
	echo "+memory +pids" >$root/cgroup.subtree_control
	;;
*)
	mount -t tmpfs c $root
	for name in blkio cpu cpuacct devices freezer memory pids; do
		mkdir $root/$name
		mount -t cgroup -o $name c $root/$name 2>/dev/null || rmdir $root/$name
	done
	mkdir $root/systemd
	mount -t cgroup -o none,name=systemd c $root/systemd
	;;
esac
case $line in
*cgroups=hybrid*)
	mkdir $root/unified
	mount -t cgroup2 c $root/unified
	;;
esac
cd /warden
python3 -m bench.kernels.guest </dev/null 2>&1
busybox poweroff -f
"""


def make(folder: Path, architecture: str = "amd64") -> Path:
    """The file. `folder`: for what is kept. SetupError."""
    base, packages, root = folder / "base", folder / "packages", folder / "root"
    _once(base, "\n".join((_SUITE, *_PACKAGES)), lambda: _debian(base, architecture))
    wanted = _python_packages()
    _once(packages, "\n".join(wanted), lambda: _install(packages, wanted, architecture))
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-al", base, root], check=True)
    shutil.copytree(packages, root / "packages", symlinks=True)
    _copy_tree(root / "warden", architecture)
    (root / "usr/lib/python3/dist-packages/warden.pth").write_text("/warden\n/packages\n")
    for name, text in (("init", _BEFORE_ROOT), ("init-in-root", _INIT)):
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    image = folder / "root.cpio"
    with image.open("wb") as file:
        subprocess.run("find . | busybox cpio -o -H newc 2>/dev/null", shell=True, cwd=root, stdout=file, check=True)
    shutil.rmtree(root)
    return image


def _once(folder: Path, what: str, fill: Callable[[], None]) -> None:
    """Fills the folder, unless it was for the same."""
    note = folder.with_suffix(".made-of")
    if folder.exists() and note.exists() and note.read_text() == what:
        return
    shutil.rmtree(folder, ignore_errors=True)
    note.unlink(missing_ok=True)
    fill()
    note.write_text(what)


def _debian(into: Path, architecture: str) -> None:
    """Unpacks it. /bin and the like become links into /usr, as Debian has it."""
    work = into.with_suffix(".archive")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    unpacked = Archive(work, [_SUITE], architecture).unpack(*_PACKAGES)
    for name in _MERGED:
        part = unpacked / name
        if part.is_dir() and not part.is_symlink():
            shutil.copytree(part, unpacked / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(part)
        (unpacked / "usr" / name).mkdir(exist_ok=True)
        part.unlink(missing_ok=True)
        part.symlink_to(f"usr/{name}")
    for path in (path for pattern in _USELESS for path in unpacked.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (unpacked / "usr/lib/python3/dist-packages").mkdir(parents=True, exist_ok=True)
    for name in ("etc", "root"):
        (unpacked / name).mkdir(exist_ok=True)
    (unpacked / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (unpacked / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    unpacked.rename(into)
    shutil.rmtree(work)


def _python_packages() -> list[str]:
    """What the agent needs, and what its tests do in there."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *_TESTING]


def _install(into: Path, wanted: Iterable[str], architecture: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *_WHEELS[architecture]]
    subprocess.run([*pip, "--only-binary", ":all:", "--target", into, *wanted], check=True)
    for info in Path(sys.prefix).glob("lib/python3.*/site-packages/gpuwarden-*.dist-info"):
        shutil.copytree(info, into / info.name)  # `--version` asks for it


def _copy_tree(into: Path, architecture: str) -> None:
    """This tree's files that git knows or would, and what was built."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *_SOURCES]
    names = subprocess.run(listed, cwd=_ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in names:
        if name and (_ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, into / name, follow_symlinks=False)
    for name, place in _BUILT[architecture].items():
        shutil.copytree(_ROOT / name, into / place, symlinks=True, dirs_exist_ok=True)
