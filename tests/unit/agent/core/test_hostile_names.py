# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names of 4 KiB with controls, broken bytes and line breaks: taken whole or cut, shown as escapes, never obeyed.

The metrics, the status page, gputop and `policy init` have tests of their own with such names.
"""

from __future__ import annotations

import gzip
import io
import json
import logging

import pytest

from agent.containers.identity import Names, bounded, identify
from agent.core import logs
from agent.core.device_ordinals import visible_devices
from agent.core.logs import JsonLines, PlainLines, TextLines
from agent.core.model import ProcessId
from agent.core.protobuf import message_classes
from agent.node.proc_parse import parse_command, parse_environ, parse_maps, parse_stat
from agent.probes.events import FunctionNames
from agent.stacks.output import MESSAGES, PACKAGE, StackReport, profile
from agent.tui.terminal import Printer
from tests.support.snapshots import GPU_0, device

HOSTILE = {
    "controls": "\x1b]0;title\x07\x1b[2J\x1b[31m\r\b\x9b6n" * 200,
    "line breaks": "\n\x85\u2028\u2029\x0b\x0c" * 700,
    "broken bytes": "\udcff\udcfe\udc80" * 1400,
    "the other way round": "\u202egnp.exe\u2066\u200f\u200b" * 300,
    "markup": "</script><b>[/][bold]&\"'`;$(reboot)" * 120,
    "digits": "9" * 4096,
    "superscripts": "\u00b2" * 4096,
    "marks upon marks": "a" + "\u0300" * 4000,
}
each = pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)


def fit(text: str) -> bool:
    """Whether a terminal shows it, and does nothing else; line breaks are ours."""
    return all(line.isprintable() for line in text.split("\n"))


@each
def test_what_proc_shows_is_cut_and_printable(name: str) -> None:
    assert fit(parse_command(f"python3\0{name}\0", 256))
    assert len(parse_command(f"python3\0{name}\0", 256)) <= 256
    assert parse_stat(f"1 ({name}) S 1 {'0 ' * 17}567 0\n").start_ticks == 567
    assert parse_environ(f"A={name}\0B=1\0", {"B"}) == {"B": "1"}
    line = f"7f00-7f10 r-xp 00000000 08:01 7 /{name.replace(chr(10), '')}/libcuda.so.1\n"
    assert len(list(parse_maps(line, lambda base: base == "libcuda.so.1"))) == 1


@each
def test_what_a_container_calls_itself_is_cut_and_printable(name: str) -> None:
    container = identify("/lxc.payload." + name.replace("/", "").replace("\n", ""))
    assert fit(container.name)
    cut = bounded(Names(name, name, name, name, {name[:200]: name, "a": name}, {f"gpuwarden.io/{name[:100]}": name}))
    texts = [cut.name, cut.pod, cut.namespace, cut.image, *cut.labels, *cut.labels.values()]
    texts += [*cut.annotations, *cut.annotations.values()]
    assert all(text is not None and fit(text) and "\n" not in text and len(text) <= 2048 for text in texts)


@each
def test_the_visible_devices_of_a_process_are_any_text(name: str) -> None:
    for text in (name, f"0,{name}", f"GPU-{name}", f"{name},0", "," * 4096):
        assert visible_devices({"CUDA_VISIBLE_DEVICES": text}, [device(0, GPU_0)]) in ((), (GPU_0,))


@each
def test_what_a_kernel_is_called_is_cut_and_printable(name: str) -> None:
    names, process = FunctionNames(), ProcessId(1, 1)
    names.learn(process, 7, name)
    assert fit(names.name(process, 7))
    assert len(names.name(process, 7)) <= 255


@each
def test_no_line_of_the_log_obeys_it_in_any_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("agent.x", logging.ERROR, __file__, 1, "%s is gone", (name,), None)
    for formatter in (TextLines(), PlainLines("gputop")):
        assert "\n" not in formatter.format(record)
        assert fit(formatter.format(record))
    assert fit(json.loads(JsonLines().format(record))["message"])
    logs.say(f"gpuwarden: {name}")
    assert fit(capsys.readouterr().err)


@each
def test_no_explanation_obeys_it(name: str) -> None:
    out = io.StringIO()
    screen = Printer(out)
    screen.line(name)
    screen.parts((name, "bold"))
    screen.pairs([(name[:40], name)])
    screen.table(["A", "B"], [[name[:40], name]])
    assert fit(out.getvalue())


@each
def test_the_strings_of_a_profile_are_printable(name: str) -> None:
    content = gzip.decompress(profile(StackReport(name, "launch", 1.0, {(name, "b"): 3})))
    read = message_classes(PACKAGE, MESSAGES)["Profile"].FromString(content)
    assert len(read.string_table) > 4
    assert all(map(str.isprintable, read.string_table))
