# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The image as files: the same folders are the same bytes, and what an image must not have is noticed."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.node.preflight import ANY_KERNEL
from tools.shipping.image import base, layout
from tools.shipping.image.check import faults_of

ROOT = Path(__file__).parents[4]
CONTAINERFILE = (ROOT / "packaging/container/Containerfile").read_text()
PAGE = ROOT / "docs/image.md"
ARGUMENTS = {
    "VERSION": "1.2.3",
    "REVISION": "abc",
    "CREATED": "2026-01-01T00:00:00Z",
    "SOURCE": "",
}
CREATED = 1_767_225_600


def tree(folder: Path) -> Path:
    """What an image has, small."""
    for path, text in {"usr/bin/gpuwarden": "#!x\n", "etc/passwd": "root\n", "usr/lib/a/b": "b\n" * 1000}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "usr/bin/gpuwarden").chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "lib").symlink_to("usr/lib")
    (folder / "usr/lib/same").symlink_to("/lib/a/b")
    return folder


def written(folders: list[Path], dest: Path, **more: str) -> str:
    """The digest of a layout of these."""
    config = layout.configuration(CONTAINERFILE, {**ARGUMENTS, **more})
    return layout.write_layout(config, folders, CREATED, "localhost/gpuwarden:1.2.3", dest)


def test_the_same_files_give_the_same_digest_whenever_and_by_whomever_they_were_made(tmp_path: Path) -> None:
    one, other = tree(tmp_path / "one/tree"), tmp_path / "other/tree"
    before = os.umask(0o077)
    tree(other)
    os.umask(before)
    for path in (other / "etc/passwd", other / "usr/lib/a"):
        os.utime(path, (1, 1))
    (other / "etc/passwd").chmod(0o664)
    assert written([one], tmp_path / "first") == written([other], tmp_path / "second")
    (other / "etc/passwd").write_text("roof\n")
    assert written([one], tmp_path / "third") != written([other], tmp_path / "fourth")


def test_a_layout_is_whole_and_matches_the_containerfile(tmp_path: Path) -> None:
    digest = written([tree(tmp_path / "tree")], tmp_path / "image")
    faults, output = faults_of(tmp_path / "image")
    assert faults == []
    assert output.startswith(digest)
    image = json.loads((tmp_path / "image/index.json").read_text())["manifests"][0]
    manifest = json.loads((tmp_path / "image/blobs" / image["digest"].replace(":", "/")).read_text())
    config = json.loads((tmp_path / "image/blobs" / manifest["config"]["digest"].replace(":", "/")).read_text())
    assert config["config"] == layout.configuration(CONTAINERFILE, ARGUMENTS)
    assert config["created"] == ARGUMENTS["CREATED"]
    with tarfile.open(tmp_path / "image/blobs" / manifest["layers"][0]["digest"].replace(":", "/")) as tar:
        entries = tar.getmembers()
    assert [entry.name for entry in entries] == sorted(
        (entry.name for entry in entries), key=lambda name: name.split("/")
    )
    assert {(entry.uid, entry.gid, entry.mtime, entry.uname) for entry in entries} == {(0, 0, CREATED, "")}


def damaged(act: Callable[[Path], object], tmp_path: Path) -> list[str]:
    """What is reported of a tree that something was done to."""
    act(folder := tree(tmp_path / "tree"))
    written([folder], tmp_path / "image")
    return faults_of(tmp_path / "image")[0]


@pytest.mark.parametrize(
    ("act", "fault"),
    [
        (lambda folder: (folder / "usr/bin/sh").write_text(""), "usr/bin/sh is in it"),
        (lambda folder: (folder / "usr/lib/x").symlink_to("y"), "usr/lib/x leads nowhere: y"),
        (lambda folder: (folder / "usr/lib/x").symlink_to("x"), "usr/lib/x leads nowhere: x"),
    ],
    ids=["a shell", "a link to nothing", "a link to itself"],
)
def test_what_must_not_be_in_an_image_is_noticed(act: Callable[[Path], object], fault: str, tmp_path: Path) -> None:
    assert damaged(act, tmp_path) == [fault]


def test_nothing_in_a_layer_is_writable_but_tmp(tmp_path: Path) -> None:
    def open_to_all(folder: Path) -> None:
        (folder / "etc/passwd").chmod(0o666)
        (folder / "etc").chmod(0o777)

    assert damaged(open_to_all, tmp_path) == []
    [layer] = [path for path in (tmp_path / "image/blobs/sha256").iterdir() if tarfile.is_tarfile(path)]
    with tarfile.open(layer) as tar:
        modes = {entry.name: entry.mode for entry in tar if not entry.issym()}
    assert (modes["etc"], modes["etc/passwd"], modes["tmp"]) == (0o555, 0o444, 0o1777)


def test_setuid_programs_and_sockets_are_refused(tmp_path: Path) -> None:
    folder = tree(tmp_path / "tree")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
        with pytest.raises(layout.LayoutError, match="neither file, folder nor link"):
            written([folder], tmp_path / "image")
    (folder / "socket").unlink()
    (folder / "usr/bin/gpuwarden").chmod(0o4755)
    with pytest.raises(layout.LayoutError, match="setuid"):
        written([folder], tmp_path / "second")


def test_a_changed_blob_is_noticed(tmp_path: Path) -> None:
    written([tree(tmp_path / "tree")], tmp_path / "image")
    (tmp_path / "image/blobs/sha256/stray").write_text("x")
    [config] = [path for path in (tmp_path / "image/blobs/sha256").iterdir() if b'"diff_ids"' in path.read_bytes()]
    config.write_bytes(config.read_bytes().replace(b"1.2.3", b"1.2.4"))
    faults, _ = faults_of(tmp_path / "image")
    assert any("is not what its descriptor says" in fault for fault in faults)
    assert "blob stray belongs to nothing" in faults


def test_a_command_that_needs_a_shell_is_refused() -> None:
    with pytest.raises(layout.LayoutError, match="no shell"):
        layout.configuration("FROM scratch\nENTRYPOINT gpuwarden run", {})


def test_only_the_last_stage_counts_and_a_label_without_a_value_is_ignored() -> None:
    text = 'FROM a AS b\nENV X=1\nFROM scratch\nARG V=2\nLABEL a="${V} x" \\\n  b="${W}"\nENV Y=3\n'
    assert layout.configuration(text, {"W": ""}) == {"Labels": {"a": "2 x"}, "Env": ["Y=3"]}


def test_a_stage_of_a_name_has_its_own_configuration_and_an_unknown_one_is_refused() -> None:
    text = "FROM a AS b\nENV X=1\nFROM scratch AS c\nENV Y=3\n"
    assert layout.configuration(text, {}, "b") == {"Env": ["X=1"]}
    with pytest.raises(layout.LayoutError, match="no stage d: one of b, c"):
        layout.configuration(text, {}, "d")


def test_the_fleets_image_is_not_root_and_asks_for_no_gpu() -> None:
    config = layout.configuration(CONTAINERFILE, ARGUMENTS, "fleet")
    assert config["User"] == "65534:65534"
    assert not [one for one in config["Env"] if one.startswith("NVIDIA_")]


def test_the_label_has_the_capabilities_that_the_agent_needs() -> None:
    labels = layout.configuration(CONTAINERFILE, ARGUMENTS)["Labels"]
    assert {f"CAP_{name}" for name in labels["io.gpuwarden.capabilities"].split(",")} == set(ANY_KERNEL)


def test_the_command_on_the_page_has_these_capabilities_and_no_more() -> None:
    commands = re.findall(
        r"^```sh\n((?:sudo )?(?:docker|podman|nerdctl) run .*?)^```", PAGE.read_text(), re.DOTALL | re.M
    )
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command)
        added = {word.removeprefix("--cap-add=") for word in words if word.startswith("--cap-add=")}
        assert {f"CAP_{name}" for name in added} == set(ANY_KERNEL)
        assert "--cap-drop=ALL" in words
        assert "--privileged" not in words


def test_the_page_builds_with_every_argument_that_becomes_a_label() -> None:
    (command,) = re.findall(r"^```sh\n(podman build .*?)^```", PAGE.read_text(), re.DOTALL | re.M)
    words = shlex.split(command)
    given = [word.partition("=")[0] for before, word in itertools.pairwise(words) if before == "--build-arg"]
    assert sorted(given) == sorted(set(re.findall(r"^ARG (\w+)$", CONTAINERFILE, re.M)))
    assert (words[words.index("-f") + 1], words[-1]) == ("packaging/container/Containerfile", ".")


def test_what_podman_mounts_from_the_node_is_made_before() -> None:
    tmpfiles = (ROOT / "packaging/systemd/tmpfiles.conf").read_text()
    made = re.findall(r"^d (\S+)", tmpfiles, re.M)
    page = PAGE.read_text()
    assert page.index("packaging/systemd/tmpfiles.conf /etc/tmpfiles.d/") < page.index("sudo podman run")
    for command in re.findall(r"^```sh\nsudo podman run .*?^```", page, re.DOTALL | re.M):
        mounted = re.findall(r"-v (\S+?):", command)
        assert {path for path in mounted if "gpuwarden" in path} == set(made)


def test_both_ways_to_an_image_take_the_same_folders() -> None:
    build = (ROOT / "packaging/container/build.sh").read_text()
    assert "packaging/container/rootfs.sh /image" in CONTAINERFILE
    assert 'packaging/container/rootfs.sh "$work"' in build
    assert re.findall(r"^COPY --from=build /image/(\w+) /$", CONTAINERFILE, re.M) == ["base", "agent"]
    assert re.findall(r"^COPY --from=build-fleet /fleet/(\w+) /$", CONTAINERFILE, re.M) == ["base", "agent", "fleet"]
    assert "layers=(base agent)" in build
    assert '"${layers[@]/#/--layer=$work/}"' in build
    given = set(re.findall(r'--argument "(\w+)=', build))
    assert given == set(re.findall(r"^ARG (\w+)$", CONTAINERFILE.partition("FROM scratch")[2], re.M))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("./lib/x86_64-linux-gnu/libc.so.6", "usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("./lib64/ld-linux-x86-64.so.2", "usr/lib64/ld-linux-x86-64.so.2"),
        ("./usr/bin/python3", "usr/bin/python3"),
        ("./etc/os-release", "etc/os-release"),
    ],
)
def test_what_packages_have_in_lib_lies_below_usr(name: str, place: str) -> None:
    assert base.merged(name) == place
