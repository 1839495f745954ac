#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# release.sh [--snapshot]: builds the files of a release in build/release: .deb packages, wheel, sdist, image, list of parts,
# licence texts, notes, SHA256SUMS. The same commit gives the same bytes (`make release-check` builds twice).
# Only a clean tree whose version has a dated entry in CHANGELOG.md is released; --snapshot builds any tree, for a trial.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "release: $*" >&2; exit 1; }
say() { echo "release: $*"; }
has_target() { grep -qE "^$1:" Makefile; }

snapshot=
case "${1:-}" in
--snapshot) snapshot=yes ;;
'') ;;
*) die "usage: $0 [--snapshot]" ;;
esac

version=$(packaging/version.sh)
machine=$(uname -m)
out=$PWD/build/release
python=$PWD/.venv/bin/python
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH PYTHONHASHSEED=0 LC_ALL=C.UTF-8 TZ=UTC
umask 022

check_state() {
	python3 -m tools.shipping.announcement --check || die "fix CHANGELOG.md first"
	[ -z "$snapshot" ] || return 0
	[ -z "$(git status --porcelain)" ] || die "the tree is not clean: commit what is to be released, or give --snapshot"
	python3 -m tools.shipping.announcement --released || die "write the entry of $version, or give --snapshot"
}

# What is committed (for a snapshot: what lies here), and nothing that was built.
lay_out_source() { # $1: where
	mkdir -p "$1"
	git ls-files -z --cached --others --exclude-standard | tar --create --null --ignore-failed-read --files-from - |
		tar --extract --directory "$1"
	chmod -R u=rwX,go=rX "$1"
	local files
	files=$(cd "$1" && find . -type f | sort)
	sed 's|^\./|include |' <<<"$files" >"$1/MANIFEST.in" # the sdist has all of it
}

# setuptools puts the build time and the builder's user into an sdist.
repack() { # $1: a tar.gz, $2: where to
	local folder
	folder=$(mktemp -d -p "$work")
	tar --extract --gzip --file "$1" --directory "$folder"
	chmod -R u=rwX,go=rX "$folder"
	pack "$folder" "$2"
}

pack() { # $1: a folder, whose files go into $2, a tar.gz or tar
	local compress=cat
	case "$2" in *.gz) compress="gzip -9n" ;; esac
	tar --create --sort=name --format=gnu --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
		--directory "$1" . --transform 's|^\./||' | $compress >"$2"
}

# The wheel has the BPF programs, so it is one for this kind of machine, though its Python code is for any.
build_python() {
	local source=$work/source
	lay_out_source "$source"
	"$python" -m build --sdist --outdir "$work/sdist" "$source" >"$work/sdist.log" 2>&1 || { cat "$work/sdist.log" >&2; die "no sdist"; }
	repack "$work"/sdist/*.tar.gz "$out/gpuwarden-$version.tar.gz"
	mkdir "$source/agent/bpf"
	install -m 644 -t "$source/agent/bpf" bpf/build/*.bpf.o
	(cd "$source" && find agent/bpf -type f | sort | sed 's|^|include |' >>MANIFEST.in)
	"$python" -m build --wheel --outdir "$out" "$source" \
		-C=--build-option=--plat-name -C="--build-option=linux_$machine" >"$work/wheel.log" 2>&1 || { cat "$work/wheel.log" >&2; die "no wheel"; }
}

build_debs() {
	if ! has_target deb; then say "skipped: .deb packages, list of parts, licences (this Makefile has no target deb)"; return; fi
	make --no-print-directory deb
	cp build/deb/*.deb "$out"
	local tree=$work/tree
	dpkg-deb --extract "$(ls "$out"/gpuwarden_*.deb)" "$tree"
	"$python" -m tools.shipping.sbom "$tree" >"$out/gpuwarden-$version.cdx.json"
	"$python" -m tools.shipping.licences "$tree" "$work/licences"
	pack "$work/licences" "$out/gpuwarden-$version-licences.tar.gz"
}

build_image() {
	if ! has_target image; then say "skipped: the image (this Makefile has no target image)"; return; fi
	make --no-print-directory image
	pack build/image "$out/gpuwarden-$version-image.tar"
	cp build/image.sbom.cdx.json "$out/gpuwarden-$version-image.cdx.json"
	cp build/image.packages.txt "$out/gpuwarden-$version-image-packages.txt"
}

check_state
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out"
build_python
build_debs
build_image
python3 -m tools.shipping.announcement --notes >"$out/RELEASE-NOTES.md"
sums=$(cd "$out" && sha256sum -- *)
echo "$sums" >"$out/SHA256SUMS"
say "$version${snapshot:+ (a snapshot)}, in build/release:"
(cd "$out" && du -h --apparent-size -- *)
