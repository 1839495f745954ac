# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A real browser without a screen: headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Final

DARK, LIGHT = 0, 1  # as --blink-settings counts them


def chromium(url: str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Opens the page, lets six seconds pass on its own clock, and ends. stderr has the console's messages."""
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


def shades(picture: Path, profile: Path) -> tuple[int, int, int, int]:
    """Width and height of a picture, and how many of its pixels are nearly white and nearly black."""
    page = picture.with_suffix(".html")
    page.write_text(_COUNTING % b64encode(picture.read_bytes()).decode())
    (counts,) = re.findall(r"<p>(\d+) (\d+) (\d+) (\d+)</p>", chromium(page.as_uri(), profile, "--dump-dom").stdout)
    width, height, light, dark = map(int, counts)
    return width, height, light, dark


_COUNTING: Final = """<!doctype html><p></p><img src="data:image/png;base64,%s"><script>
onload = () => {
    const { width, height } = document.images[0];
    const drawing = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
    drawing.drawImage(document.images[0], 0, 0);
    const { data } = drawing.getImageData(0, 0, width, height);
    let light = 0, dark = 0;
    for (let at = 0; at < data.length; at += 4) {
        light += Math.min(data[at], data[at + 1], data[at + 2]) > 190;
        dark += Math.max(data[at], data[at + 1], data[at + 2]) < 80;
    }
    document.querySelector("p").textContent = [width, height, light, dark].join(" ");
};
</script>"""
