# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real browser without a screen: headless Chromium."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

DARK, LIGHT = 0, 1  # as --blink-settings counts them


def chromium(url: str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Opens the page, lets six seconds pass on its own clock, and ends. stderr has what the console said."""
    binary = shutil.which("chromium")
    assert binary, "install Debian's package chromium"
    command = [
        binary,
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1280,900",
        "--virtual-time-budget=6000",
        "--enable-logging=stderr",
        "--no-first-run",
        f"--user-data-dir={profile}",
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),
        *flags,
        url,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)


def size_and_corner(picture: Path) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Width and height of a PNG, and the colour of its first pixel, which no filter changes."""
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, packed = 8, b""
    while at < len(data):
        (length,), kind = struct.unpack_from(">I", data, at), data[at + 4 : at + 8]
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    width, height = struct.unpack_from(">II", data, 16)
    red, green, blue = zlib.decompress(packed)[1:4]
    return (width, height), (red, green, blue)
