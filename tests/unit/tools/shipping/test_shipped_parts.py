# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is shipped is listed with its licence, and comes with the licence's text; what has none is not shipped."""

from __future__ import annotations

import base64
import hashlib
import json
import sysconfig
from importlib.metadata import PackageNotFoundError, PathDistribution
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tools.shipping import dpkg, licences
from tools.shipping.allowed import is_allowed
from tools.shipping.closure import closure, copy, requirements
from tools.shipping.distributions import KNOWN, Distribution, distributions, known
from tools.shipping.sbom import SbomError, sbom
from tools.shipping.version import ROOT

SITE = "usr/lib/gpuwarden/lib/python3.11/site-packages"
STATUS = """\
Package: libthing1
Status: install ok installed
Architecture: amd64
Version: 2:1.0-1+deb12u1
Description: a thing
 with a long story

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def distribution(tree: Path, name: str, version: str, *fields: str, text: str | None = "Free.\n") -> Path:
    folder = tree / SITE / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *fields]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n")
    if text is not None:
        (folder / "licenses").mkdir()
        (folder / "licenses/LICENSE").write_text(text)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """As a package installs it: the agent, a program in the kernel, a distribution that needs another one."""
    root = tmp_path / "tree"
    distribution(root, "gpuwarden", "1.2.3", "License-Expression: Apache-2.0", "Requires-Dist: Lean_On>=1")
    distribution(root, "lean-on", "2.0", "License: mit", 'Requires-Dist: dots ; extra == "more"', "Requires-Dist: ISCy")
    distribution(root, "iscy", "3", "Classifier: License :: OSI Approved :: ISC License (ISCL)")
    (root / "usr/lib/gpuwarden/gpuwarden.bpf.o").write_bytes(b"\x7fELF")
    return root


def debian(tree: Path, *, text: str = "See /usr/share/common-licenses/Thing-2.\n") -> None:
    for path, content in (
        ("var/lib/dpkg/status", STATUS),
        ("usr/share/doc/libthing1/copyright", text),
        ("usr/share/common-licenses/Thing-2", "Thing 2.\n"),
    ):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(content)


def part(document: Any, name: str) -> Any:
    (found,) = (one for one in document["components"] if one["name"] == name)
    return found


def test_the_list_of_parts_has_each_with_version_licence_and_address(tree: Path) -> None:
    debian(tree, text="Format: x\n\nFiles: *\nLicense: GPL-2+\n text\n\nLicense: Expat\n")
    document = json.loads(sbom(tree))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    agent = document["metadata"]["component"]
    assert (agent["name"], agent["version"], agent["type"]) == ("gpuwarden", "1.2.3", "application")
    assert [one["name"] for one in document["components"]] == ["gpuwarden.bpf.o", "iscy", "lean-on", "libthing1"]
    assert part(document, "lean-on")["purl"] == "pkg:pypi/lean-on@2.0"
    assert part(document, "lean-on")["licenses"] == [{"license": {"id": "MIT"}}]
    assert part(document, "iscy")["licenses"] == [{"license": {"id": "ISC"}}]
    package = part(document, "libthing1")
    assert package["purl"] == "pkg:deb/debian/libthing1@2:1.0-1%2Bdeb12u1?arch=amd64"
    assert [one["license"]["name"] for one in package["licenses"]] == ["Expat", "GPL-2+"]


def test_the_list_of_parts_has_hashes(tree: Path) -> None:
    document = json.loads(sbom(tree))
    record = (tree / SITE / "iscy-3.dist-info/RECORD").read_bytes()
    for name, content in (("gpuwarden.bpf.o", b"\x7fELF"), ("iscy", record)):
        assert part(document, name)["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}]


def test_the_list_of_parts_states_what_needs_what(tree: Path) -> None:
    needs = {one["ref"]: one.get("dependsOn", []) for one in json.loads(sbom(tree))["dependencies"]}
    assert needs["pkg:generic/gpuwarden@1.2.3"] == ["bpf:gpuwarden.bpf.o", "pkg:pypi/lean-on@2.0"]
    assert needs["pkg:pypi/lean-on@2.0"] == ["pkg:pypi/iscy@3"]
    assert needs["pkg:pypi/iscy@3"] == []


def test_what_is_compiled_into_a_distribution_is_below_it(tree: Path) -> None:
    folder = tree / SITE / "iscy-3.dist-info/sboms"
    folder.mkdir()
    crate = {"name": "crate", "version": "4", "purl": "pkg:cargo/crate@4", "licenses": [{"expression": "MIT OR Zlib"}]}
    (folder / "iscy.cyclonedx.json").write_text(json.dumps({"bomFormat": "CycloneDX", "components": [crate, crate]}))
    (inside,) = part(json.loads(sbom(tree)), "iscy")["components"]
    assert (inside["name"], inside["purl"]) == ("crate", "pkg:cargo/crate@4")
    assert inside["licenses"] == [{"expression": "MIT OR Zlib"}]


def test_the_same_tree_gives_the_same_list_and_only_a_given_time_is_in_it(tree: Path) -> None:
    first = sbom(tree)
    assert first == sbom(tree)
    assert "serialNumber" not in first
    assert "timestamp" not in first
    assert json.loads(sbom(tree, 1_700_000_000))["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"


def test_a_folder_that_is_no_installed_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SbomError, match="no installed tree"):
        sbom(tmp_path)


def test_the_programs_in_the_kernel_say_both_licences_in_spdx_words() -> None:
    for path in (ROOT / "bpf").glob("*.bpf.c"):
        assert licences.bpf_licence(f"{path.stem}.o") == "GPL-2.0-only OR BSD-2-Clause"


def test_the_texts_of_everything_in_the_tree_are_gathered(tree: Path, tmp_path: Path) -> None:
    debian(tree)
    (tree / SITE / "borrowed").mkdir()
    (tree / SITE / "borrowed/COPYING.txt").write_text("Copied.\n")
    licences.write(licences.gather(tree), tmp_path / "out")
    gathered = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert gathered == {
        "README",
        "gpuwarden/LICENSE",
        "gpuwarden/bpf/BSD-2-Clause.txt",
        "gpuwarden/bpf/GPL-2.0-only.txt",
        "gpuwarden/bpf/libbpf.txt",
        "python/iscy/LICENSE",
        "python/lean-on/LICENSE",
        "python/borrowed/COPYING.txt",
        "debian/libthing1/copyright",
        "debian/common-licenses/Thing-2",
    }
    index = (tmp_path / "out/README").read_text()
    assert all(name in index for name in gathered - {"README"})
    assert "python lean-on 2.0\n    MIT\n" in index


def test_what_must_not_be_shipped_is_named_all_at_once_and_nothing_is_written(tree: Path, tmp_path: Path) -> None:
    distribution(tree, "textless", "1", "License-Expression: MIT", text=None)
    distribution(tree, "silent", "1")
    distribution(tree, "viral", "1", "License-Expression: GPL-3.0-or-later")
    debian(tree)
    (tree / "usr/share/doc/libthing1/copyright").unlink()
    with pytest.raises(licences.LicenceError) as refused:
        licences.write(licences.gather(tree), tmp_path / "out")
    for line, word in zip(
        str(refused.value).split("\n"),
        ("silent 1 does not say", "textless 1 ships no", "viral 1 is under GPL-3.0-or-later", "debian libthing1"),
        strict=True,
    ):
        assert word in line
    assert not (tmp_path / "out").exists()


def test_a_licence_that_was_accepted_for_one_distribution_is_no_mistake_there_and_one_elsewhere(tree: Path) -> None:
    distribution(tree, "scipy", "1", "License: its own", text="text")
    distribution(tree, "other", "1", "License-Expression: LGPL-2.1-or-later", text="text")
    mistakes = licences.gather(tree).mistakes
    assert not [one for one in mistakes if "scipy" in one]
    assert [one for one in mistakes if "other 1 is under LGPL-2.1-or-later" in one]


def test_a_copyright_file_outside_of_the_tree_is_none(tree: Path, tmp_path: Path) -> None:
    debian(tree)
    outside = tmp_path / "outside"
    outside.write_text("not of the tree")
    (tree / "usr/share/doc/libthing1/copyright").unlink()
    (tree / "usr/share/doc/libthing1/copyright").symlink_to(outside)
    (package,) = dpkg.packages(tree)
    assert dpkg.copyright_file(tree, package) is None


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-2.0-only OR BSD-2-Clause", True),
        ("GPL-2.0-only AND BSD-2-Clause", False),
        ("(MIT OR AGPL-3.0-only) AND Zlib", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("LGPL-2.1-or-later", False),
    ],
)
def test_a_licence_is_allowed_if_one_choice_of_it_is(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


@pytest.mark.parametrize("text", ["BSD", "MIT AND", "See LICENSE", ""])
def test_what_is_no_licence_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no SPDX licence expression"):
        is_allowed(text)


def test_what_is_required_is_copied_as_it_was_published_and_refused_where_it_was_changed(tmp_path: Path) -> None:
    info = tmp_path / "site/thing-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site/thing.py").write_text("x = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"thing.py,sha256={digest},6\n../../bin/thing,,\nthing-1.0.dist-info/METADATA,,\n")
    copy(PathDistribution(info), tmp_path / "copy")
    files = {
        path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert files == {"thing.py", "thing-1.0.dist-info/METADATA"}
    (tmp_path / "site/thing.py").write_text("x = 2\n")
    with pytest.raises(ValueError, match=r"thing\.py is not as it was published"):
        copy(PathDistribution(info), tmp_path / "copy")


def test_a_requirement_that_is_not_installed_in_that_version_is_named() -> None:
    with pytest.raises(PackageNotFoundError, match=r"pyyaml>=999 \(installed: "):
        closure(["pyyaml>=999"])
    assert "pyyaml" in closure(['pyyaml; python_version > "3"'])
    assert not closure(['pyyaml; python_version < "3"'])


def shipped() -> list[Distribution]:
    """What gpuwarden, and its fleet where that is an image, requires, as it is installed here."""
    names = closure([*requirements(), *requirements(extra="fleet")])
    return [one for one in distributions(Path(sysconfig.get_paths()["purelib"])) if one.name in names]


def test_each_dependency_that_is_installed_here_has_a_text_and_a_licence_that_goes_with_ours() -> None:
    assert len(shipped()) > 10
    gathered = licences.Gathered()
    for one in shipped():
        licences.distribution(gathered, one)
    assert gathered.mistakes == []


def test_what_is_compiled_into_our_dependencies_may_be_shipped_too() -> None:
    for one in shipped():
        for path in (one.folder / "sboms").glob("*.json"):
            for component in json.loads(path.read_text()).get("components", []):
                for license_entry in component.get("licenses", []):
                    assert "expression" not in license_entry or is_allowed(license_entry["expression"]), (
                        one.name,
                        component["name"],
                    )


def test_what_was_looked_up_is_about_what_is_shipped_and_its_texts_are_there() -> None:
    assert set(known()) <= {one.name for one in shipped()}, "no longer a dependency: remove it from known.toml"
    texts = {entry["text"] for entry in known().values() if "text" in entry} | {"libbpf.txt", KNOWN.name}
    assert texts == {path.name for path in KNOWN.parent.iterdir()}


def test_the_text_of_nvidias_bindings_is_the_one_at_their_head() -> None:
    head = Path(str(pynvml.__file__)).read_text().split("#####")[1]
    written = "\n".join(line.removeprefix("#").removeprefix(" ") for line in head.strip().split("\n"))
    assert " ".join(written.split()) == " ".join((KNOWN.parent / "nvidia-ml-py.txt").read_text().split())
