# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What mkdocs needs to know of pages that are written to be read in the repository, too."""

from __future__ import annotations

import re
from typing import Final

_OUTSIDE: Final = re.compile(r"\[([^][]*)\]\((?:\.\./)+(?:agent|bench|bpf|enforce|sim|packaging)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to files that are not part of the site are text there."""
    return _OUTSIDE.sub(r"\1", markdown)
