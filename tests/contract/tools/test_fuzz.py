# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The committed inputs of the fuzzer, each once a fault or a way far into a parser, and the fuzzer itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fuzz.__main__ import HTTP_STREAM, ROOT, Outcome, main, names, outcome_of, table
from tests.fuzz.target import CORPUS, MOST_CPU_SECONDS, SEPARATOR, SlowError, Target, answers, judge, seeds
from tests.fuzz.targets import TARGETS

INPUTS = [(name, path) for name in TARGETS for path in seeds(name)]


@pytest.mark.parametrize(("name", "path"), INPUTS, ids=[f"{name}/{path.name}" for name, path in INPUTS])
def test_an_input_gives_a_value_or_the_documented_error(name: str, path: Path) -> None:
    TARGETS[name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_inputs_that_lead_into_it(name: str) -> None:
    assert len(seeds(name)) > 0


def test_every_corpus_belongs_to_a_target() -> None:
    assert set(names()) == {*TARGETS, HTTP_STREAM}


def test_the_kernels_parser_of_http_passes_its_inputs_under_sanitizers(tmp_path: Path) -> None:
    program = tmp_path / "http_stream"
    flags = ["-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    includes = ["-Ibpf", "-Itests/support/programs"]
    subprocess.run(["gcc", *flags, *includes, "tests/fuzz/http_stream.c", "-o", program], cwd=ROOT, check=True)
    inputs = seeds(HTTP_STREAM)
    done = subprocess.run([program, *inputs], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{len(inputs)}\n")


def test_an_input_that_takes_longer_than_a_second_is_a_fault() -> None:
    times = iter((0.0, MOST_CPU_SECONDS + 0.1))
    with pytest.raises(SlowError, match=r"3 bytes took 1\.1 s"):
        judge(Target("", lambda _data: None), b"abc", lambda: next(times))


def test_some_inputs_are_tried_as_large_as_their_source_may_send_them() -> None:
    tried: list[int] = []
    target = Target("", lambda data: tried.append(len(data)), grown_bytes=1000)
    for number in range(2000):
        judge(target, number.to_bytes(2, "big"))
    grown = [size for size in tried if size != 2]
    assert grown
    assert set(grown) == {1000}


def test_the_answers_of_an_input_are_given_in_turn() -> None:
    following = answers(SEPARATOR.join([b"a", b"b"]))
    assert [following() for _ in range(3)] == [b"a", b"b", b"a"]


SAID = """
Test unit written to /x/crash-1
stat::number_of_executed_units: 1200
stat::average_exec_per_sec:     600
stat::new_units_added:          7
stat::slowest_unit_time_sec:    0
stat::peak_rss_mb:              51
"""


def test_figures_and_faults_are_what_libfuzzer_said() -> None:
    assert outcome_of("elf", 77, 2.2, SAID) == Outcome("elf", 1200, 2, 7, 51, ("/x/crash-1",))


def test_a_process_that_ended_without_figures_is_a_fault_and_its_figures_are_unknown() -> None:
    found = outcome_of("elf", 1, 2.2, "")
    assert found == Outcome("elf", None, 2, None, None, ("no input was written",))
    assert "–" in table([found])


def test_an_unknown_target_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--targets", "elv"]) == 2
    assert "no target elv; there are annotations" in capsys.readouterr().err
    assert CORPUS.is_dir()
