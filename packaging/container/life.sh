#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# life.sh [--image LAYOUT]: the whole life of the container image, a line for each step; see tests/e2e/packaging/image_life.py.
set -eu
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m tests.e2e.packaging.image_life "$@"
