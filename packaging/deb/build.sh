#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# build.sh OUT [VERSION]: builds the Debian packages of this working tree into OUT and runs lintian on them. With VERSION
# quickly, without lintian and of that version, to try upgrades. debhelper wants debian/ at the top, so it builds a copy of
# the tree. What is compiled for this machine's architecture comes out of packaging/runtime.sh's Debian 11, so that the
# packages can be installed there and on whatever is newer. Wants root, `make setup` and `packaging/setup.sh deb`. lintian's errors fail it.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() { echo "deb: $*" >&2; exit 1; }
[ $# -ge 1 ] || die "usage: $0 OUT [VERSION]"
root=$PWD
mkdir -p "$1"
out=$(cd "$1" && pwd)
rm -rf "$out"/source "$out"/gpuwarden*
mkdir "$out/source"

: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export SOURCE_DATE_EPOCH PYTHON=$root/.venv/bin/python RUNTIME=$root/build/runtime/root
packaging/runtime.sh build/runtime

git ls-files -z --cached --others --exclude-standard | xargs -0 cp -a --parents -t "$out/source"
mkdir -p "$out/source/bpf/build"
cp -a bpf/build/*.bpf.o "$out/source/bpf/build" # newer than their sources, as sim/build is: they are not made again
packaging/runtime.sh build/runtime --simulator "$out/source/sim"
cd "$out/source"
cp -a packaging/deb debian
if [ $# -ge 2 ]; then # it lives for minutes
	sed -i "0,/^version = .*/s//version = \"$2\"/" pyproject.toml
	printf 'gpuwarden (%s) UNRELEASED; urgency=medium\n\n  * To upgrade from.\n\n -- %s  %s\n' "$2" \
		"$(sed -n 's/^Maintainer: //p' debian/control)" "$(date --rfc-email --utc --date="@$SOURCE_DATE_EPOCH")" >debian/changelog
	export COMPRESSION=-Znone
else
	"$PYTHON" -m tools.shipping.announcement --debian >debian/changelog
fi

find . -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} + # what debhelper installs keeps its time

log=$out/build.log
dpkg-buildpackage --build=binary --no-sign >"$log" 2>&1 || { tail -n 30 "$log" >&2; die "failed; all of it is in $log"; }
[ $# -ge 2 ] || lintian --allow-root --fail-on error "$out"/gpuwarden_*.changes || die "lintian reports errors"
for package in "$out"/*.deb; do
	echo "deb: $package: $(du -k "$package" | cut -f1) kB, installed $(dpkg-deb --field "$package" Installed-Size) kB"
done
