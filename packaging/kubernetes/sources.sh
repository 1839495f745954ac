#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# One hash over the chart's own files, names and contents: what base/ and monitoring/ were rendered from. In a checkout
# those that git knows, so that an editor's leavings change nothing.
set -euo pipefail
cd "$(dirname "$0")/chart"
known() { git ls-files -z 2>/dev/null | sed -z 's#^#./#' | grep -zv '^\./files/'; }
{ known || find . -type f -not -path './files/*' -print0; } | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-64
