#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# build.sh OUT: builds the .rpm packages of this working tree into OUT, of the same trees as the Debian ones. Wants root,
# `make setup` and `packaging/setup.sh rpm`.
set -euo pipefail
cd "$(dirname "$0")/../.."
. packaging/debian-system.sh

[ $# -ge 1 ] || die "usage: $0 OUT"
out=$(realpath -m "$1")
trees=$out/trees
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export SOURCE_DATE_EPOCH RUNTIME=$PWD/build/runtime/root

make_trees() {
	local package
	rm -rf "$trees"
	mkdir -p "$trees/source"
	git ls-files -z --cached --others --exclude-standard sim | xargs -0 cp -a --parents -t "$trees/source"
	packaging/runtime.sh build/runtime
	packaging/runtime.sh build/runtime --simulator "$trees/source/sim"
	for package in gpuwarden gpuwarden-sim; do
		SIMULATOR=$trees/source/sim/build packaging/tree.sh "$trees/$package" "$package"
		list_files "$package" >"$trees/$package.files"
	done
}

list_files() { # as rpm's %files wants them, folders that are no other package's included
	(
		cd "$trees/$1"
		find . ! -type d ! -path ./etc/gpuwarden/policy.yaml -printf '"/%P"\n'
		find . -type d \( -path ./etc/gpuwarden -o -path "./usr/lib/$1" -o -path "./usr/lib/$1/*" -o -path "./usr/share/doc/$1*" -o -path "./usr/share/fish*" \) -printf '%%dir "/%P"\n'
	)
}

build() {
	rpmbuild --quiet -bb --target "$(uname -m)" --define "_topdir $out/rpmbuild" --define "_rpmdir $out" \
		--define "trees $trees" --define "version_of_tree $(packaging/version.sh)" --define "_binary_payload w6.xzdio" \
		--define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
		--define "_buildhost localhost" packaging/rpm/gpuwarden.spec >"$out/log" 2>&1 || { tail -n 20 "$out/log" >&2; die "failed: $out/log"; }
	mv "$out/$(uname -m)"/*.rpm "$out"
	rmdir "$out/$(uname -m)"
}

mkdir -p "$out"
rm -f "$out"/*.rpm
make_trees
build
for package in "$out"/*.rpm; do
	echo "rpm: $package: $(du -k "$package" | cut -f1) kB, installed $(($(rpm -qp --queryformat '%{SIZE}' "$package") / 1024)) kB"
done
