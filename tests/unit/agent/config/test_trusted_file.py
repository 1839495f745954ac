# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Files that say what the agent does are not read where others could have written them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.config.trusted_file import exposed, read_trusted
from agent.core.errors import TrustError


@pytest.mark.parametrize(
    ("user", "mode", "expected"),
    [
        (0, 0o644, None),
        (0, 0o400, None),
        (0, 0o666, "by every user"),
        (0, 0o660, "by its group"),
        (os.geteuid(), 0o600, None),
        (os.geteuid() + 1, 0o600, "chown it to root"),
    ],
)
def test_only_root_or_ourselves_may_be_able_to_write_it(user: int, mode: int, expected: str | None) -> None:
    why = exposed("/", cast(Any, SimpleNamespace(st_uid=user, st_mode=0o100000 | mode)))
    assert why is expected or (why is not None and expected is not None and expected in why)


def test_what_is_not_trusted_is_named_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(0o604)
    assert read_trusted(path, 7) == b"content"
    with pytest.raises(TrustError, match="larger than"):
        read_trusted(path, 6)
    path.chmod(0o602)
    with pytest.raises(TrustError, match=f"{path} can be written by every user.*chmod go-w"):
        read_trusted(path, 7)
    with pytest.raises(TrustError, match="not a regular file"):
        read_trusted(Path("/dev/zero"), 7)


def test_a_file_in_a_directory_that_others_can_write_is_not_trusted_either(tmp_path: Path) -> None:
    folder = tmp_path / "everybodys"
    folder.mkdir()
    path = folder / "file"
    path.write_bytes(b"content")
    path.chmod(0o600)
    assert read_trusted(path, 7) == b"content"
    folder.chmod(0o777)
    with pytest.raises(TrustError, match=f"{path} lies in {folder}, where every user"):
        read_trusted(path, 7)
