# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Kernels of Debian, started under qemu with one program in them: for what this machine's own kernel does not do.

Versions come and go in the archive, so one is picked by what there is. What cannot be had is a SetupError.
"""

from __future__ import annotations

import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from agent.core.errors import SetupError
from agent.node import preflight

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SOURCES = ("debian-security bookworm-security", "debian trixie-backports")
_NAME = r"^(linux-(?:image|binary)-(\d+\.\d+)\S*-cloud-{architecture}) -"
_DOWNLOAD_SECONDS, _UNPACK_SECONDS, _BOOT_SECONDS = 60, 120, 400
_NO_CALL = (1 << 16).to_bytes(4, "little")  # in place of -335
_SETUP_SECTORS, _PAYLOAD = 0x1F1, 0x248  # in the header of an image: the kernel's Documentation/arch/x86/boot.rst
_INIT = """\
#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc p /proc
$B mount -t sysfs s /sys
$B mount -t devtmpfs d /dev
$B mount -t tracefs t /sys/kernel/tracing
echo "kernel: $($B uname -r)"
LD_LIBRARY_PATH=/t:/lib /t/guest /t {arguments}
$B poweroff -f
"""


def require() -> None:
    """SetupError where nothing can be booted."""
    if platform.machine() != "x86_64":
        raise SetupError("the kernels that are booted here are for x86-64")
    for program in ("qemu-system-x86_64", "busybox", "apt-get"):
        if not shutil.which(program):
            raise SetupError(f"{program} is missing: run `make packages-test`")


def _mirror() -> str:
    """The mirror of this machine's packages, without the archive's name. SetupError when it is not configured."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    sites = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    found = [site.removesuffix("/debian") for site in sites if site.endswith("/debian")]
    if not found:
        raise SetupError("apt has no source that ends with /debian: run `apt-get update`")
    return found[0]


class Archive:
    """Debian's archive, apart from what this machine has installed. SetupError when it cannot be reached.

    `sources`: archive and suite. `architecture`: Debian's name of it. A folder for each object.
    """

    def __init__(self, folder: Path, sources: Iterable[str] = _SOURCES, architecture: str = "amd64") -> None:
        self._folder, self._architecture = folder, architecture
        for part in ("etc/apt/sources.list.d", "lists/partial", "cache/archives/partial", "dpkg", "kernels"):
            (folder / part).mkdir(parents=True)
        (folder / "dpkg" / "status").touch()
        lines = (f"deb [signed-by={_KEYRING}] {_mirror()}/{source} main\n" for source in sources)
        (folder / "etc/apt/sources.list").write_text("".join(lines))
        self._run("apt-get", "update")

    @cached_property
    def _kernels(self) -> list[tuple[tuple[int, int], str]]:
        listed = self._run("apt-cache", "search", "--names-only", "^linux-(image|binary)-[0-9].*cloud")
        found = re.findall(_NAME.format(architecture=self._architecture), listed, re.MULTILINE)
        return sorted((preflight.kernel_version(version), name) for name, version in found)

    def kernel(self, oldest: tuple[int, int], before: tuple[int, int], *, newest: bool = False) -> Path:
        """The image of the oldest kernel in that range, or of the newest one."""
        names = [name for version, name in self._kernels if oldest <= version < before]
        for name in reversed(names) if newest else names:
            into = self.package(name)
            images: list[Path] = [*into.glob("boot/vmlinuz*"), *into.glob("usr/lib/modules/*/vmlinuz")]
            if images:  # what is signed and what is not, the image and its parts are packages of their own
                return images[0]
        raise SetupError(f"the archive has no kernel from {oldest} to {before} now")

    def package(self, name: str) -> Path:
        """A folder with what one package holds."""
        self._run("apt-get", "download", name)
        (package,) = (self._folder / "kernels").glob(f"{name}_*.deb")
        into = self._folder / "kernels" / name
        self._run("dpkg", "-x", str(package), str(into), limit_seconds=_UNPACK_SECONDS)
        return into

    def unpack(self, *names: str) -> Path:
        """A folder with packages and all that they depend on, the C library included."""
        self._run("apt-get", "install", "--yes", "--no-install-recommends", "--download-only", *names)
        into = self._folder / "unpacked"
        for package in (self._folder / "cache/archives").glob("*.deb"):
            self._run("dpkg", "-x", str(package), str(into), limit_seconds=_UNPACK_SECONDS)
        return into

    def _run(self, *command: str, limit_seconds: float = _DOWNLOAD_SECONDS) -> str:
        folder = self._folder
        options = {
            "Dir::Etc": folder / "etc/apt",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "dpkg/status",
            "Dir::Cache": folder / "cache",
            "APT::Architecture": self._architecture,
            "APT::Sandbox::User": "root",
            "Acquire::Retries": "2",
        }
        flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
        if not command[0].startswith("apt-"):
            flags = []
        try:
            return subprocess.run(
                [command[0], *flags, *command[1:]],
                cwd=folder / "kernels",
                check=True,
                capture_output=True,
                text=True,
                timeout=limit_seconds,
            ).stdout
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
            raise SetupError(f"Debian's archive cannot be used: {' '.join(command)}: {reason}") from error


_SECCOMP_EXCEPTION = re.compile(rb"(\x8d[\x80-\xbf])\xb1\xfe\xff\xff(\x83[\xf8-\xff]\x01)")
"""lea -335(%REGISTER), …; cmp $1, …: whether a system call is uretprobe or uprobe, which pass seccomp"""


def without_seccomp_exception(image: Path, to: Path) -> Path:
    """A kernel whose seccomp filters see uretprobe and uprobe like any other call; strict mode's list is as it was.

    It is the same machine code but for that comparison. qemu boots what is not compressed as well.
    """
    if not shutil.which("zstd"):
        raise SetupError("zstd is missing: run `make packages-test`")
    content = image.read_bytes()
    offset, length = struct.unpack_from("<II", content, _PAYLOAD)
    start = (content[_SETUP_SECTORS] + 1) * 512 + offset
    packed = content[start : start + length - 4]  # its last four bytes are the length of what it was
    kernel = subprocess.run(["zstd", "-dcq"], input=packed, capture_output=True, check=True).stdout
    patched, found = _SECCOMP_EXCEPTION.subn(lambda code: code[1] + _NO_CALL + code[2], kernel)
    if found != 1:
        raise SetupError(f"{image.name} has {found} places that look like seccomp's exception, not one")
    to.write_bytes(patched)
    return to


def pack(folder: Path, program: Path, files: Iterable[Path], arguments: str = "") -> Path:
    """An initial file system that runs `guest /t ARGUMENTS`. `files` lie beside it in /t."""
    root = folder / "root"
    for part in ("bin", "dev", "lib", "lib64", "proc", "sys", "t"):
        (root / part).mkdir(parents=True)
    files = list(files)
    for path in (program, *files):
        shutil.copy(path, root / "t" / path.name)
    linking = [program, *(path for path in files if ".so" in path.name)]
    linked = subprocess.run(["ldd", *linking], check=True, capture_output=True, text=True).stdout
    for found in re.findall(r"(/\S+) \(0x", linked):
        shutil.copy(found, root / ("lib64" if "ld-linux" in found else "lib"))
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    (root / "init").write_text(_INIT.format(arguments=arguments))
    (root / "init").chmod(0o755)
    image = folder / "guest.cpio"
    with image.open("wb") as file:
        subprocess.run("find . | busybox cpio -o -H newc", shell=True, cwd=root, stdout=file, check=True)
    return image


def boot(kernels: Iterable[Path], guest: Path) -> list[str]:
    """Boots all at once, and returns the console output of each."""
    options = ["-smp", "1", "-m", "768", "-nographic", "-no-reboot", "-net", "none", "-initrd", str(guest)]
    line = "console=ttyS0 quiet panic=-1 mitigations=off"
    machines = [
        subprocess.Popen(
            ["qemu-system-x86_64", *options, "-kernel", str(kernel), "-append", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for kernel in kernels
    ]
    try:
        consoles = [machine.communicate(timeout=_BOOT_SECONDS)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()  # its end, and its pipe's
    return [text.decode(errors="replace").replace("\r", "") for text in consoles]
