# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every source file, folder and module of ours that documentation, comments, scripts and units name exists."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], text=True)
FILES = [name for name in TRACKED.splitlines() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
FOLDERS = {name.split("/")[0] for name in FILES if "/" in name and not name.startswith((".", "LICENSES/"))}
CHART = "packaging/kubernetes/chart/"  # its values and templates have dotted names, too
PRODUCT = ("agent", "enforce", "gpuwarden")
TEXTS = [
    name
    for name in FILES
    if not name.startswith(("docs/images/", "LICENSES/", "bpf/LICENSES/", "CHANGELOG.md"))
    and not name.endswith((".json", ".csv", ".png", ".svg", ".gz", "/test_named_files.py"))
]

_SOURCE = re.compile(r"(?<![\w.*/{}$<>\[-])(?:\.\./)*((?:[\w-]+/)*[\w-]+(?:\.bpf)?\.(?:py|sh|[ch]))\b(?![\w(/])")
_BELOW = re.compile(rf"(?<![\w./${{}}*@~<-])((?:{'|'.join(sorted(FOLDERS))})/[\w./-]*\w)(?![\w*{{$%}}])")
_RUN = re.compile(r'-m(?: |", ")([a-z_]\w*(?:\.[a-z_]\w*)*)')
_DOTTED = re.compile(rf"(?<![\w./@-])((?:{'|'.join(sorted(FOLDERS))})(?:\.[a-z]\w*){{2,}})(?!\.o)\b(?<!\.o)")

# Files of others (the kernel's, libbpf's, distributions', a user's), and those of a folder of licence texts.
FOREIGN = re.compile(
    r"^(?:(?:include/)?linux/|arch/|bpf/(?:lib)?bpf\w*\.h$|py(?:dantic|gments)/|prometheus_client/|hijack/"
    r"|gpuwarden/(?:LICENSE$|bpf\b))"
)
FOREIGN_NAMES = {
    *("NAME.bpf.c", "NAME.h", "bpf_core_read.h", "bpf_helpers.h", "bpf_tracing.h"),
    *("_mapping.py", "default.py", "example.py", "monokai.py", "pynvml.py", "python.py", "special.py", "train.py"),
}
BUILT = (
    "agent/bpf",
    "bpf/build/",
    "sim/build/",
    "docs/.",
    "conformance/results",
)  # results: those of a real GPU, once kept


def endings(names: list[str]) -> set[str]:
    """Each path, and what is left of it without its first folders: prose names files from where it stands."""
    return {"/".join(parts[start:]) for parts in (name.split("/") for name in names) for start in range(len(parts))}


ENDINGS = endings(FILES)


def is_module(name: str, inside: str = "") -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / inside).exists()


def mistakes(name: str, text: str) -> Iterator[str]:
    """What the text of that file names and what is not there."""
    code_of_tests = name.startswith("tests/")  # makes up files and trees
    for source in _SOURCE.findall(text):
        is_member = name.endswith((".c", ".h")) and "/" not in source  # of a struct: `call.c`
        of_ours = source.split("/")[0] in FOLDERS if code_of_tests else not is_member
        if of_ours and source not in ENDINGS | FOREIGN_NAMES and not FOREIGN.match(source):
            yield source
    for path in () if code_of_tests else _BELOW.findall(text):
        if (
            not (ROOT / path).exists()
            and not path.startswith(BUILT)
            and path not in ENDINGS
            and not FOREIGN.match(path)
        ):
            yield path
    for module in _RUN.findall(text):
        if module.split(".")[0] in FOLDERS and not is_module(module, "__main__.py"):
            yield f"-m {module}"
    if not name.endswith((".py", ".c", ".h")) and not name.startswith(CHART):
        yield from (dotted for dotted in _DOTTED.findall(text) if not is_module(dotted) and dotted not in ENDINGS)


def test_every_file_folder_and_module_that_is_named_exists() -> None:
    found = {
        f"{name}: {mistake}" for name in TEXTS for mistake in mistakes(name, (ROOT / name).read_text(errors="ignore"))
    }
    assert not found


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("see agent/gone.py.", "agent/gone.py"),
        ("`gone/away.bpf.c` has it", "gone/away.bpf.c"),
        ("as gone_too.py does", "gone_too.py"),
        ("everything in enforce/gone/", "enforce/gone"),
        ("python -m agent.gone", "-m agent.gone"),
        ("python -m agent", "-m agent"),
        ('[sys.executable, "-m", "enforce.gone"]', "-m enforce.gone"),
        ("the logger enforce.gone.away", "enforce.gone.away"),
    ],
)
def test_what_is_not_there_is_found(text: str, mistake: str) -> None:
    assert mistake in set(mistakes("docs/page.md", text))
    assert not set(mistakes("docs/page.md", "agent/core/clock.py, core/clock.py, ../bpf/maps.bpf.h, -m gpuwarden"))


def test_the_map_of_the_repository_has_each_folder_and_no_other() -> None:
    firsts = re.findall(r"^\| ([^|]*`\w+/[^|]*) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [path for first in firsts for path in re.findall(r"`([\w/]+)/`", first)]
    assert {path.split("/")[0] for path in named} == FOLDERS
    rooms = {str(room.parent.relative_to(ROOT)) for part in PRODUCT for room in (ROOT / part).glob("*/__init__.py")}
    assert {path for path in named if path.split("/")[0] in PRODUCT} == {*PRODUCT, *rooms} - {"gpuwarden/policy_init"}


_IMPORT = re.compile(
    rf"\bfrom ((?:{'|'.join(sorted(FOLDERS))})(?:\.\w+)*) import ([A-Za-z_]\w*(?: as \w+)?(?:, \w+(?: as \w+)?)*)"
)


@cache
def defined(module: str) -> set[str]:
    """Names at the top of a module, and the modules in it where it is a package."""
    path = ROOT.joinpath(*module.split("."))
    names = {below.stem for below in path.iterdir()} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())) if file.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def unknown_imports(text: str) -> Iterator[str]:
    """What programs in strings and in scripts import, which no type checker reads, and is not there."""
    for module, names in _IMPORT.findall(text):
        if module.startswith("packaging."):  # of PyPI
            continue
        known = defined(module)
        yield from (
            f"{module}.{name}" for name in re.split(r"(?: as \w+)?(?:, |$)", names) if name and name not in known
        )


def test_every_import_in_a_string_or_a_script_is_of_something_that_exists() -> None:
    texts = {name: (ROOT / name).read_text(errors="ignore") for name in TEXTS}
    assert not {f"{name}: {unknown}" for name, text in texts.items() for unknown in unknown_imports(text)}
    wrong = "from agent.core.clock import monotonic_ns, gone as here"
    assert list(unknown_imports(f"python -c '{wrong}'")) == ["agent.core.clock.gone"]
