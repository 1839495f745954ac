# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m dashboards`: writes what is generated here. What is committed is what this writes; a test says if not."""

from __future__ import annotations

from dashboards.generated import FOLDER, files

if __name__ == "__main__":
    for name, text in files().items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
