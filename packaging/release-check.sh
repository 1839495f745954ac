#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# Builds the release twice and compares the sums, then tries the wheel in a fresh environment, on the simulated GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

first=$(mktemp)
trap 'rm -f "$first"' EXIT
packaging/release.sh --snapshot
cp build/release/SHA256SUMS "$first"
packaging/release.sh --snapshot
if ! diff "$first" build/release/SHA256SUMS; then
	echo "release-check: the files above differ from one build to the next" >&2
	exit 1
fi
echo "release-check: $(wc -l <"$first") files, the same bytes twice"
GPUWARDEN_WHEEL=$(echo "$PWD"/build/release/*.whl) .venv/bin/pytest tests/e2e/packaging/test_the_wheel.py -q
