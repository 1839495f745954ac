# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What mkdocs needs to know of pages that are written to be read in the repository, too."""

from __future__ import annotations

import re
from typing import Any, Final

_UP: Final = re.compile(r"\[([^][]*)\]\(((?:\.\./)+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links out of docs/ are text on the site: what they lead to is no part of it. `page`: mkdocs's."""
    depth = page.file.src_uri.count("/")
    return _UP.sub(lambda link: link[1] if link[2].count("../") > depth else link[0], markdown)
