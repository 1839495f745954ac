#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# Prints the version: [project] version in pyproject.toml is the only place where it stands.
set -eu
version=$(awk -F '"' '/^\[/ { section = $0 } section == "[project]" && /^version *=/ { print $2; exit }' \
	"$(dirname "$0")/../pyproject.toml")
[ -n "$version" ] || { echo "version.sh: pyproject.toml has no [project] version" >&2; exit 1; }
echo "$version"
