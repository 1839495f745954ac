# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What packaging/repository.sh makes of packages and a key, as apt and the readers of rpm metadata take it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KEY = "test@gpuwarden.invalid"
SPEC = """
Name: hello
Version: 1
Release: 1
Summary: s
License: MIT
BuildArch: noarch
%description
d
%files
"""


def run(*command: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def keys() -> Iterator[dict[str, str]]:
    """An environment in which gpg has a key of its own; its socket's path has to be short."""
    folder = tempfile.mkdtemp(prefix="gpg")
    environment = {**os.environ, "GNUPGHOME": folder}
    made = run("gpg", "--batch", "--passphrase", "", "--quick-gen-key", KEY, environment=environment)
    assert made.returncode == 0, made.stderr
    yield environment
    run("gpgconf", "--kill", "all", environment=environment)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    work = tmp_path_factory.mktemp("packages")
    control = work / "hello/DEBIAN/control"
    control.parent.mkdir(parents=True)
    control.write_text("Package: hello\nVersion: 1\nArchitecture: amd64\nMaintainer: x <x@x.invalid>\nDescription: x\n")
    deb, spec = work / "hello_1_amd64.deb", work / "hello.spec"
    assert run("dpkg-deb", "--root-owner-group", "--build", control.parents[1], deb).returncode == 0
    spec.write_text(SPEC)
    defines = [f"_topdir {work}/top", f"_rpmdir {work}"]
    made = run("rpmbuild", "-bb", *(word for one in defines for word in ("--define", one)), spec)
    assert made.returncode == 0, made.stderr
    return [deb, work / "noarch/hello-1-1.noarch.rpm"]


@pytest.fixture(scope="module")
def repository(keys: dict[str, str], packages: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("published") / "repository"
    made = run(ROOT / "packaging/repository.sh", out, KEY, *packages, environment=keys)
    assert made.returncode == 0, made.stderr
    return out


def test_apt_takes_the_packages_only_with_the_key(repository: Path, tmp_path: Path) -> None:
    def update(signed_by: Path) -> subprocess.CompletedProcess[str]:
        (tmp_path / "lists/partial").mkdir(parents=True, exist_ok=True)
        sources = tmp_path / "sources.list"
        sources.write_text(f"deb [signed-by={signed_by} arch=amd64] file:{repository}/apt stable main\n")
        state = [f"Dir::State::Lists={tmp_path}/lists", f"Dir::Etc::SourceList={sources}", "Dir::Etc::SourceParts=-"]
        options = [word for one in (*state, "APT::Sandbox::User=root") for word in ("-o", one)]
        done = run("apt-get", *options, "update")
        return done if done.returncode else run("apt-cache", *options, "policy", "hello")

    known = update(repository / "gpuwarden.asc")
    assert "Candidate: 1" in known.stdout, known.stderr
    shutil.rmtree(tmp_path / "lists")
    other = update(Path("/usr/share/keyrings/debian-archive-keyring.gpg"))
    assert "is not signed" in other.stderr


def test_rpm_metadata_and_packages_are_signed(repository: Path, keys: dict[str, str], tmp_path: Path) -> None:
    metadata = repository / "rpm/repodata/repomd.xml"
    verified = run("gpg", "--batch", "--verify", f"{metadata}.asc", metadata, environment=keys)
    assert verified.returncode == 0, verified.stderr
    database = ["--dbpath", str(tmp_path / "rpm")]
    assert run("rpmkeys", *database, "--import", repository / "gpuwarden.asc").returncode == 0
    (package,) = (repository / "rpm").glob("*.rpm")
    checked = run("rpmkeys", *database, "--checksig", "--verbose", package)
    assert "Signature, key ID" in checked.stdout
    assert checked.returncode == 0, checked.stdout


def test_a_key_that_gpg_does_not_have_is_refused(keys: dict[str, str], packages: list[Path], tmp_path: Path) -> None:
    made = run(ROOT / "packaging/repository.sh", tmp_path / "out", "absent@x.invalid", *packages, environment=keys)
    assert (made.returncode, (tmp_path / "out").exists()) == (1, False)
    assert "gpg has no secret key absent@x.invalid" in made.stderr
