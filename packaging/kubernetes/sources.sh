#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# One hash over the chart's own files, names and contents: what base/ and monitoring/ were rendered from.
set -euo pipefail
cd "$(dirname "$0")/chart"
find . -type f -not -path './files/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-64
