# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What packaging/tree.sh makes, and so what packages and images install: small, whole, on no other program's path."""

from __future__ import annotations

import gzip
import re
import subprocess
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bench.fleet.api_server import ApiServer, Cluster
from bench.fleet.prometheus import Prometheus, figures

ROOT = Path(__file__).parents[3]
LARGEST_BYTES = 40_000_000
IMPORT_ALL = """
import importlib, pkgutil, agent, enforce, gpuwarden
names = [m.name for p in (agent, enforce, gpuwarden) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names), agent.__file__)
"""


def made(folder: Path, package: str) -> Path:
    subprocess.run([ROOT / "packaging/tree.sh", folder, package], check=True)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("tree"), "gpuwarden")


@pytest.fixture
def home(tree: Path) -> Path:
    """The agent's own environment."""
    return tree / "usr/lib/gpuwarden"


@pytest.fixture
def packages(home: Path) -> Path:
    """Where its Python packages are."""
    (found,) = home.glob("lib/python3.*/site-packages")
    return found


def files(tree: Path) -> Iterator[Path]:
    return (path for path in sorted(tree.rglob("*")) if path.is_symlink() or path.is_file())


def run(home: Path, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """The environment's own Python, as its commands start it, where others have put packages called as ours."""
    for name in ("agent", "rich"):
        (folder / f"{name}.py").write_text("raise SystemExit('a decoy was run')\n")
    command = [home / "bin/python3", "-I", *arguments]
    environment = {"PYTHONPATH": str(folder), "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_it_is_small(tree: Path) -> None:
    assert sum(path.lstat().st_size for path in files(tree)) < LARGEST_BYTES


def test_everything_is_where_packages_put_it(tree: Path) -> None:
    for path in (
        "etc/gpuwarden/policy.yaml",
        "usr/bin/gputop",
        "usr/bin/gpuwarden",
        "usr/lib/gpuwarden/deny.bpf.o",
        "usr/lib/gpuwarden/gpuwarden.bpf.o",
        "usr/lib/gpuwarden/http.bpf.o",
        "usr/lib/gpuwarden/stacks.bpf.o",
        "usr/lib/gpuwarden/uprobe.bpf.o",
        "usr/lib/systemd/system/gpuwarden.service",
        "usr/lib/sysusers.d/gpuwarden.conf",
        "usr/lib/tmpfiles.d/gpuwarden.conf",
        "usr/share/bash-completion/completions/gpuwarden",
        "usr/share/fish/vendor_completions.d/gputop.fish",
        "usr/share/man/man1/gputop.1.gz",
        "usr/share/man/man8/gpuwarden.8.gz",
        "usr/share/zsh/vendor-completions/_gpuwarden",
    ):
        assert (tree / path).is_file(), path
    assert {path.relative_to(tree).parts[0] for path in files(tree)} == {"etc", "usr"}
    assert not [path for path in tree.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]


def test_nothing_is_there_that_only_installing_and_testing_need(packages: Path) -> None:
    names = {path.name for path in packages.iterdir()}
    assert not names & {"pip", "setuptools", "pkg_resources", "pytest", "sim", "bench", "tests"}
    assert not [path for path in packages.rglob("*") if path.is_dir() and path.name in ("test", "tests", "testdata")]


def test_every_module_is_imported_and_nothing_is_compiled_at_run_time(
    tree: Path, home: Path, packages: Path, tmp_path: Path
) -> None:
    before = set(files(tree))
    done = run(home, "-c", IMPORT_ALL, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    count, where = done.stdout.split()
    assert int(count) > 200
    assert Path(where).is_relative_to(packages)
    assert set(files(tree)) == before
    sources = [path for path in packages.rglob("*.py") if not (path.parent / "__pycache__").is_dir()]
    assert not sources


def test_gputop_shows_a_recording(home: Path, tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    recording.write_bytes(gzip.decompress((ROOT / "docs/images/gputop.jsonl.gz").read_bytes()))
    done = run(home, home / "bin/gputop", "--replay", recording, "--once", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "training" in done.stdout


def test_the_commands_are_isolated_from_the_callers_environment(tree: Path, home: Path) -> None:
    for name in ("gpuwarden", "gputop"):
        assert (home / "bin" / name).read_text().startswith("#!/usr/lib/gpuwarden/bin/python3 -I\n")
        assert (tree / "usr/bin" / name).resolve() == home / "bin" / name


def test_the_copyright_file_names_every_package_that_is_shipped(tree: Path, packages: Path) -> None:
    text = (ROOT / "packaging/deb/copyright").read_text()
    stanzas = re.findall(r"^Files: (.*?)^Copyright:", text, re.MULTILINE | re.DOTALL)
    patterns = [pattern for stanza in stanzas for pattern in stanza.split() if "site-packages" in pattern]
    theirs = [p for p in files(packages) if p.relative_to(packages).parts[0] not in ("agent", "enforce", "gpuwarden")]
    unnamed = {
        str(path.relative_to(tree))
        for path in theirs
        if ".dist-info" not in str(path) and not any(fnmatch(str(path.relative_to(tree)), one) for one in patterns)
    }
    assert not unnamed


@pytest.fixture(scope="module")
def simulated_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("sim"), "gpuwarden-sim")


def test_the_simulated_gpu_is_on_the_path_of_the_agents_environment_only(
    simulated_tree: Path, tree: Path, packages: Path
) -> None:
    in_the_environment = packages.relative_to(tree) / "gpuwarden-sim.pth"
    outside = {
        path.relative_to(simulated_tree)
        for path in files(simulated_tree)
        if not path.is_relative_to(simulated_tree / "usr/lib/gpuwarden-sim")
    }
    assert outside == {in_the_environment}
    assert (simulated_tree / in_the_environment).read_text() == "/usr/lib/gpuwarden-sim\n"
    for name in (
        "sim/demo/__init__.py",
        "sim/build/bin/gpusim",
        "sim/build/lib/libcuda.so.1",
        "tools/harness/containers/container.py",
    ):
        assert (simulated_tree / "usr/lib/gpuwarden-sim" / name).is_file(), name


def test_the_demo_is_found_by_its_entry_point(simulated_tree: Path, home: Path, tmp_path: Path) -> None:
    under = simulated_tree / "usr/lib/gpuwarden-sim"
    script = "import site, sys; site.addsitedir(sys.argv.pop(1)); from gpuwarden.main import main; main()"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "of-sim").mkdir()
    (tmp_path / "of-sim/gpuwarden-sim.pth").write_text(f"{under}\n")
    done = run(home, "-c", script, tmp_path / "of-sim", "demo", "--help", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "--seconds" in done.stdout
    done = run(home, home / "bin/gpuwarden", "demo", folder=folder)
    assert "install gpuwarden-sim" in done.stderr
    assert not [path for path in under.rglob("*.py") if not (path.parent / "__pycache__").is_dir()]


@pytest.fixture(scope="module")
def fleets_home(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fleet's layer over the agent's tree, as in the image."""
    layer, whole = made(tmp_path_factory.mktemp("layer"), "fleet"), tmp_path_factory.mktemp("whole")
    for part in (tree, layer):
        subprocess.run(["cp", "-a", f"{part}/.", whole], check=True)
    return whole / "usr/lib/gpuwarden"


def test_the_fleets_layer_has_its_commands(fleets_home: Path, tmp_path: Path) -> None:
    done = run(fleets_home, fleets_home / "bin/gpuwarden", "fleet", "formats", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_fleets_installed_service_makes_plans(fleets_home: Path) -> None:
    """In a process that it spawns, which reads the command's file again, with SciPy as bytecode."""
    api, prometheus = ApiServer(Cluster()), Prometheus(figures(2, 2))
    api.cluster.add("etl", {"gpuwarden.io/memory": "8Gi", "gpuwarden.io/kernel": "1ms"})
    for server in (api, prometheus):
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    where = ["--prometheus", prometheus.url, "--kubernetes", api.url, "--listen", "127.0.0.1:0"]
    command = [str(fleets_home / "bin/python3"), "-I", str(fleets_home / "bin/gpuwarden"), "fleet", "serve", *where]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        assert "serves on http://127.0.0.1:" in serving.stderr.readline()
        assert ": 1 of 1 waiting pods have a GPU" in serving.stderr.readline()
        serving.terminate()
    api.stopped = True
    for server in (api, prometheus):
        server.shutdown()
        server.server_close()


def test_a_folder_with_something_in_it_is_not_made_into_a_tree(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = subprocess.run([ROOT / "packaging/tree.sh", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not empty: remove it first" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
