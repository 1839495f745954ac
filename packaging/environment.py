# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where the scripts beside this file run, whichever Python starts them: $PYTHON, else what `make setup` makes."""

import os
import sys
from pathlib import Path
from typing import NoReturn

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = Path(os.environ.get("PYTHON", _ROOT / ".venv/bin/python"))


def run(module: str) -> NoReturn:
    """Goes on as that module, with the same arguments."""
    if not _PYTHON.exists():
        sys.exit(f"{sys.argv[0]}: {_PYTHON} is not there: run `make setup` first")
    os.execve(_PYTHON, [_PYTHON, "-m", module, *sys.argv[1:]], {**os.environ, "PYTHONPATH": str(_ROOT)})
