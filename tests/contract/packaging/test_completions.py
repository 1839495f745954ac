# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The completions in real shells, and the man pages in a real reader."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.model import Snapshot
from agent.exporters.api.client import PATH
from agent.exporters.api.routes import Api
from tests.support.serving import ApiServer, never, no_story
from tests.support.snapshots import rich_snapshot

PACKAGING = Path(__file__).parents[3] / "packaging"
SCRIPTS = {
    shell: {path.name.strip("_").removesuffix(".fish"): path for path in (PACKAGING / "completions" / shell).iterdir()}
    for shell in ("bash", "zsh", "fish")
}
ALL = [(shell, path) for shell, paths in SCRIPTS.items() for path in paths.values()]


def output_of(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def completed(shell: str, line: str, script: str) -> set[str]:
    """What the shell offers for the last word of the line."""
    if shell == "fish":
        return {found.split("\t")[0] for found in output_of("fish", text=f"{script}\ncomplete -C '{line}'").split("\n")}
    words = line.split(" ")
    ask = f'COMP_WORDS=({" ".join(words[:-1])} "{words[-1]}"); COMP_CWORD={len(words) - 1}; _shtab_{words[0]}'
    shown = output_of("bash", "--norc", text=f'{script}\n{ask}; printf "%s\\n" "${{COMPREPLY[@]}}"')
    return {found.strip() for found in shown.split("\n")}


@pytest.fixture
def script_of(tmp_path: Path) -> Iterator[dict[str, str]]:
    """gpuwarden's scripts, which ask an agent that knows two containers, one of them malicious."""

    def snapshot() -> Snapshot:
        made = rich_snapshot()
        row = made.containers[0]
        evil = f"$(touch {tmp_path}/owned)"
        hostile = replace(row, container=replace(row.container, name=evil, pod=f"x;touch {tmp_path}/owned"))
        good = replace(row, container=replace(row.container, name="chat-0", pod="chat-7f"))
        return replace(made, containers=(good, hostile))

    with ApiServer(tmp_path, Api(snapshot, no_story, never)) as served:
        path = str(served.orders)
        yield {shell: SCRIPTS[shell]["gpuwarden"].read_text().replace(str(PATH), path) for shell in SCRIPTS}
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(("shell", "path"), ALL, ids=[f"{shell}-{path.name}" for shell, path in ALL])
def test_the_shell_can_read_it(shell: str, path: Path) -> None:
    assert output_of(shell, "-n", str(path)) == ""


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_commands_and_options_are_completed(shell: str) -> None:
    script = SCRIPTS[shell]["gpuwarden"].read_text()
    assert {"report", "release"} <= completed(shell, "gpuwarden re", script)
    assert "--run-dir" in completed(shell, "gpuwarden release --r", script)
    assert "launches" in completed(shell, "gpuwarden report --sort l", script)
    assert "--seconds" in completed(shell, "gpuwarden demo --s", script)
    assert "--by-gpu" in completed(shell, "gputop --by", SCRIPTS[shell]["gputop"].read_text())


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_files_are_completed_where_one_is_asked_for_and_not_for_the_path_of_a_request(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1.yaml").touch()
    script = SCRIPTS[shell]["gpuwarden"].read_text()
    for line in ("gpuwarden run --policy v", "gpuwarden doctor --libcuda v", "gpuwarden demo --json v"):
        assert "v1.yaml" in completed(shell, line, script), line
    assert "v1.yaml" not in completed(shell, "gpuwarden policy init --path v", script)


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize("line", ["gpuwarden explain chat", "gpuwarden stacks --container chat"])
def test_containers_are_asked_of_the_agent_and_their_names_are_never_run(
    shell: str, line: str, script_of: dict[str, str]
) -> None:
    assert completed(shell, line, script_of[shell]) - {""} == {"chat-0", "chat-7f"}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_nothing_in_the_folder_where_one_asks_is_run(
    shell: str, script_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "re", "socket"):
        (tmp_path / f"{name}.py").write_text(f'open("{tmp_path}/owned", "w")')
    monkeypatch.chdir(tmp_path)
    assert completed(shell, "gpuwarden explain chat", script_of[shell]) - {""} == {"chat-0", "chat-7f"}


def test_zsh_gets_the_same_names(script_of: dict[str, str]) -> None:
    functions = script_of["zsh"].partition("# Custom Preamble")[2].partition("# End Custom Preamble")[0]
    assert output_of("zsh", "-f", text=f"{functions}\n_gpuwarden_containers") == "chat-0\nchat-7f\n"


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_without_an_agent_no_container_is_offered(shell: str) -> None:
    script = SCRIPTS[shell]["gpuwarden"].read_text().replace(str(PATH), "/nonexistent")
    assert completed(shell, "gpuwarden explain c", script) == {""}


@pytest.mark.parametrize("path", sorted((PACKAGING / "man").iterdir()), ids=lambda path: path.name)
def test_a_man_page_is_rendered_without_a_warning(path: Path) -> None:
    assert output_of("mandoc", "-Tlint", str(path)) == ""
    assert 'id="EXIT_STATUS"' in output_of("mandoc", "-Thtml", str(path))
