# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The parts of an installed tree as CycloneDX 1.6: the agent, its BPF programs, Python distributions, Debian packages.

What a distribution says of the parts that are compiled into it (PEP 770) is nested below it. The same tree gives the
same bytes: there is no serial number, and no time but SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from tools.shipping import dpkg
from tools.shipping.distributions import Distribution, distributions
from tools.shipping.licences import bpf_licence

_AGENT: Final = "gpuwarden"
_LICENCES: Final = LicenseFactory()


class SbomError(ValueError):
    """The tree has no parts that could be listed."""


def sbom(tree: Path, epoch: int | None = None) -> str:
    """The document, checked against the official schema. `epoch`: seconds; None: it says no time."""
    bom = Bom()
    found = distributions(tree)
    agent = next((one for one in found if one.name == _AGENT), None)
    if agent is None:
        raise SbomError(f"{tree} has no {_AGENT}-*.dist-info: it is no installed tree")
    parts = {one.name: _distribution(one) for one in found}
    bom.metadata.component = parts[_AGENT]
    objects = [_object(path, agent.version) for path in sorted(tree.rglob("*.bpf.o"))]
    debian = [_package(tree, package) for package in dpkg.packages(tree)]
    for component in (*objects, *debian, *(part for name, part in parts.items() if name != _AGENT)):
        bom.components.add(component)
    for one in found:
        needed = [parts[name] for name in one.requires if name in parts]
        bom.register_dependency(parts[one.name], [*needed, *(objects if one is agent else ())])
    return _written(bom, epoch)


def _written(bom: Bom, epoch: int | None) -> str:
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["serialNumber"], document["metadata"]["timestamp"]
    if epoch is not None:
        document["metadata"]["timestamp"] = datetime.fromtimestamp(epoch, UTC).isoformat()
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise SbomError(f"what was made is no CycloneDX: {wrong}")
    return text


def _distribution(one: Distribution) -> Component:
    ours = one.name == _AGENT
    purl = PackageURL("generic" if ours else "pypi", None, one.name, one.version)
    return Component(
        type=ComponentType.APPLICATION if ours else ComponentType.LIBRARY,
        bom_ref=str(purl),
        name=one.name,
        version=one.version,
        description=next(iter(one.metadata.metadata.get_all("Summary", [])), None),
        licenses=_licences(one.licence),
        hashes=_sha256(one.record_sha256),
        purl=purl,
        components=_compiled_in(one),
    )


def _compiled_in(one: Distribution) -> Iterator[Component]:
    """Of its own lists of parts. References of theirs would clash with others', so they get ours."""
    for path in sorted((one.folder / "sboms").glob("*.json")):
        bill = json.loads(path.read_text())
        inside = bill.get("components", []) if bill.get("bomFormat") == "CycloneDX" else []
        for part in inside:
            purl = PackageURL.from_string(part["purl"]) if "purl" in part else None
            yield Component(
                bom_ref=f"{one.name}:{part.get('purl') or part['name']}",
                name=part["name"],
                version=part.get("version"),
                licenses=[found for choice in part.get("licenses", []) for found in _licences(_expression(choice))],
                purl=purl,
            )


def _expression(licence: dict[str, Any]) -> str | None:
    inner = licence.get("license", {})
    expression: str | None = licence.get("expression") or inner.get("id") or inner.get("name")
    return expression


def _object(path: Path, version: str) -> Component:
    return Component(
        type=ComponentType.FILE,
        bom_ref=f"bpf:{path.name}",
        name=path.name,
        version=version,
        description="BPF programs, for this kernel architecture and any kernel that is new enough",
        licenses=_licences(bpf_licence(path.name)),
        hashes=_sha256(hashlib.sha256(path.read_bytes()).hexdigest()),
    )


def _package(tree: Path, package: dpkg.Package) -> Component:
    text = dpkg.copyright_file(tree, package)
    names = dpkg.licence_names(text.read_text(errors="replace")) if text else []
    purl = PackageURL("deb", "debian", package.name, package.version, {"arch": package.architecture})
    return Component(
        bom_ref=str(purl),
        name=package.name,
        version=package.version,
        licenses=[_LICENCES.make_with_name(name) for name in names],  # Debian's names, which are not SPDX's
        purl=purl,
    )


def _licences(expression: str | None) -> list[License]:
    return [_LICENCES.make_from_string(expression)] if expression else []


def _sha256(digest: str | None) -> Iterable[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where the tree has no parts."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.shipping.sbom", description="The parts of an installed tree as CycloneDX, on stdout."
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="what is shipped, as if it were the root")
    options = parser.parse_args(arguments)
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        sys.stdout.write(sbom(options.tree, int(epoch) if epoch else None))
    except ValueError as error:
        sys.stderr.write(f"sbom: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
