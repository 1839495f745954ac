# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An authority of the tests' own and the certificates that it gives, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """\
[ca]
default_ca = here
[here]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[extensions]
subjectAltName = {names}
"""
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
ALWAYS = ("20200101000000Z", "20991231000000Z")
LONG_AGO = ("20200101000000Z", "20200102000000Z")


def openssl(*arguments: str | Path, text: str = "") -> str:
    """What it prints."""
    done = subprocess.run(["openssl", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class Certificate:
    """Two files in PEM."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority that signs every request."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        (folder / "index").touch()
        subject = ("-subj", f"/CN={folder.name}", "-days", "2", "-keyout", self._key, "-out", self.cert)
        openssl("req", "-x509", *_KEY, *subject)

    def issue(
        self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", valid: tuple[str, str] = ALWAYS
    ) -> Certificate:
        """For these alternative names, valid from the one time to the other."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        wanted, config = self._folder / f"{name}.csr", self._folder / f"{name}.cnf"
        config.write_text(_CONFIG.format(folder=self._folder, names=names))
        openssl("req", "-new", *_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", wanted)
        by = ("-cert", self.cert, "-keyfile", self._key, "-startdate", valid[0], "-enddate", valid[1])
        how = ("-batch", "-notext", "-extensions", "extensions", "-in", wanted, "-out", made.cert)
        openssl("ca", "-config", config, *by, *how)
        return made
