# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet split`: the file it reads and the fragments it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fleet.command import main
from fleet.model import FleetError
from fleet.pipeline.document import duration, parse

PIPELINE = """
slo: {target: 200ms, quantile: 0.99, window: 5s}
stages:
  detect:
    match: {namespace: serving, pod: "detect-*"}
    levels: [{latency: 30ms, offline: 10%}, {latency: 60ms, offline: 45%}]
  track:
    after: [detect]
    slo: {signal: http, port: 8000, min_samples: 50}
    levels: [{latency: 20ms, offline: 5%}, {latency: 90ms, offline: 60%}]
  read: {after: detect, levels: [{latency: 100ms, offline: 0.5}]}
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return path


def test_the_text_is_rules_for_a_policy(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", str(pipeline)]) == 0
    text = capsys.readouterr().out
    rules = {rule["name"]: rule for rule in yaml.safe_load(text)["online"]}
    assert rules["detect"]["match"] == {"namespace": "serving", "pod": "detect-*"}
    assert rules["detect"]["slo"] == {"signal": "gpu_wait", "quantile": 0.99, "target": "75ms", "window": "5s"}
    assert rules["track"]["match"] == {"pod": "track-*"}
    assert rules["track"]["slo"]["port"] == 8000
    assert "# offline work keeps 1.55 of 3 GPUs; no split leaves more" in text


def test_annotations_are_what_a_pod_may_declare(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", str(pipeline), "--as", "annotations"]) == 0
    _, track, _ = yaml.safe_load_all(capsys.readouterr().out)
    assert track["metadata"]["annotations"] == {
        "gpuwarden.io/class": "online",
        "gpuwarden.io/slo-p99": "120ms",
        "gpuwarden.io/signal": "http",
        "gpuwarden.io/port": "8000",
        "gpuwarden.io/window": "5s",
        "gpuwarden.io/min-samples": "50",
    }


def test_a_signal_that_no_pod_may_declare_is_for_a_policy_alone(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.write_text(PIPELINE.replace("signal: http, port: 8000", "signal: prometheus, metric: m"))
    assert main(["split", str(pipeline), "--as", "annotations"]) == 2
    assert "'track' cannot be declared by a pod" in capsys.readouterr().err
    assert main(["split", str(pipeline), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert stages["track"]["annotations"] is None
    assert stages["detect"]["annotations"] is not None


def test_a_split_in_use_is_kept_while_little_changes(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["split", str(pipeline), "--json"]) == 0
    before = tmp_path / "before.json"
    before.write_text(capsys.readouterr().out)
    pipeline.write_text(PIPELINE.replace("60ms", "58ms"))
    assert main(["split", str(pipeline), "--json", "--before", str(before)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(before.read_text())
    assert main(["split", str(pipeline), "--before", str(before)]) == 0
    assert capsys.readouterr().out.startswith("# kept")
    pipeline.write_text(PIPELINE.replace("200ms", "300ms"))
    assert main(["split", str(pipeline), "--json", "--before", str(before)]) == 0
    assert json.loads(capsys.readouterr().out)["slo_s"] == 0.3


@pytest.mark.parametrize("text", ["", "{}", '{"stages": [1]}', '{"stages": {"a": {"slo_s": "x"}}}'])
def test_what_is_no_earlier_split_is_refused(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    before = tmp_path / "before.json"
    before.write_text(text)
    assert main(["split", str(pipeline), "--before", str(before)]) == 2
    assert "write it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slo: {target: 200ms", "slo: {target: 200", "`target` of `slo` is no duration"),
        ("slo: {target: 200ms", "slo: {target: 40ms", "no split meets the SLO of 40 ms: detect → read takes 130 ms"),
        ("after: [detect]", "after: [detct]", "'track' comes after 'detct', which is no stage"),
        ("after: [detect]", "after: [track]", "track → track wait for each other"),
        ("after: [detect]", "after: 7", "`after` of stage 'track' is neither"),
        ("after: [detect]", "befor: [detect]", "stage 'track' has the unknown key 'befor'"),
        ("{signal: http", "{target: 5ms, signal: http", "'track' has a `target` of its own"),
        ("offline: 0.5}", "offline: yes}", "`offline` of a level of stage 'read' is no share"),
        ("offline: 0.5}", "offline: 50}", "offline is 0 to 1"),
        ("  read:", "  detect:", "the key 'detect' is given twice"),
        ("  read:", '  "re\\e[31md":', "is no name of a stage"),
        ("[{latency: 100ms, offline: 0.5}]", "7", "'read' has no list of `levels`"),
        ("stages:", "steps:", "unknown key 'steps'"),
        ("]", "", "it is not YAML"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(
    pipeline: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert old in PIPELINE
    pipeline.write_text(PIPELINE.replace(old, new))
    assert main(["split", str(pipeline)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "\x1b" not in err


def test_what_is_no_file_no_text_or_far_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pipeline.yaml"
    for content, message in ((None, "cannot read"), (b"\xff", "not UTF-8"), (b"#" * (1 << 19), "larger than 256 KiB")):
        if content is not None:
            path.write_bytes(content)
        assert main(["split", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_endless_nesting_is_refused_at_once() -> None:
    with pytest.raises(FleetError, match="not YAML"):
        parse("[" * 200_000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.03, "30ms"), (0.0300009, "30000us"), (0.0000015, "1us"), (0.1 + 0.2, "300ms"), (2.0, "2000ms")],
)
def test_durations_are_rounded_down_to_what_a_policy_can_say(seconds: float, text: str) -> None:
    assert duration(seconds) in (text, text.replace("30000us", "30ms"))


def test_a_stage_that_gets_less_than_a_microsecond_is_an_error() -> None:
    with pytest.raises(FleetError, match="less than 1us"):
        duration(5e-7)
