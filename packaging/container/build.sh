#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# build.sh [DEST [fleet]]: makes the container image as an OCI layout in DEST (build/image), without an engine and without
# root; with `fleet` that of the fleet's service, which has one layer more.
# Beside it: DEST.packages.txt, the Debian packages in it, and DEST.sbom.cdx.json. The same commit, Python packages and
# Debian packages (PINNED=DEST.packages.txt) give the same digest. Times are the commit's, or SOURCE_DATE_EPOCH.
set -euo pipefail
cd "$(dirname "$0")/../.."

dest=${1:-build/image}
stage=${2:-agent}
layers=(base agent)
name=gpuwarden
[ "$stage" = agent ] || { layers+=("$stage") && name+=-$stage; }
python=.venv/bin/python
containerfile=packaging/container/Containerfile
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export SOURCE_DATE_EPOCH
version=$(packaging/version.sh)
revision=$(git rev-parse HEAD)
[ -z "$(git status --porcelain)" ] || revision+=-modified
source=$(git remote get-url origin 2>/dev/null | grep -E '^https://[^@]+$' || true) # others may hold a password

work=$dest.partial
packaging/container/rootfs.sh "$work" ${2:+"$2"}
"$python" -m tools.shipping.image.layout --containerfile "$containerfile" --stage "$stage" --created "$SOURCE_DATE_EPOCH" \
	--name "localhost/$name:$version" --argument "VERSION=$version" --argument "REVISION=$revision" \
	--argument "SOURCE=$source" --argument "CREATED=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)" \
	"${layers[@]/#/--layer=$work/}" "$work/layout"
"$python" -m tools.shipping.image.check "$work/layout"

rm -rf "$dest"
mv "$work/layout" "$dest"
mv "$work/packages.txt" "$dest.packages.txt"
mv "$work/sbom.cdx.json" "$dest.sbom.cdx.json"
rm -rf "$work"
