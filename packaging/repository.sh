#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# repository.sh OUT KEY PACKAGE…: a folder to publish as it is, with the packages given (.deb, .rpm) and the metadata that
# apt and dnf read: OUT/apt, OUT/rpm and OUT/gpuwarden.asc, the public key. KEY is an OpenPGP key that gpg has, by its
# fingerprint or address; its owner signs, so nothing secret is kept here. GNUPGHOME is gpg's own variable. Wants
# `packaging/setup.sh rpm`.
set -euo pipefail

die() { echo "$(basename "$0" .sh): $*" >&2; exit 1; }
[ $# -ge 3 ] || die "usage: $0 OUT KEY PACKAGE…"
out=$(realpath -m "$1")
key=$2
shift 2
gpg --batch --quiet --list-secret-keys "$key" >/dev/null 2>&1 || die "gpg has no secret key $key: see gpg --list-secret-keys, or make one"
[ ! -e "$out" ] || [ -z "$(ls -A "$out")" ] || die "$out is not empty: remove it first"
sign() { gpg --batch --yes --local-user "$key" "$@"; }

make_apt() {
	local pool=$out/apt/pool suite=$out/apt/dists/stable architecture
	mkdir -p "$pool" "$suite"
	cp "$@" "$pool"
	for architecture in $(for package in "$pool"/*.deb; do dpkg-deb --field "$package" Architecture; done | sort -u); do
		mkdir -p "$suite/main/binary-$architecture"
		(cd "$out/apt" && apt-ftparchive --arch "$architecture" packages pool) >"$suite/main/binary-$architecture/Packages"
		gzip -9nk "$suite/main/binary-$architecture/Packages"
	done
	(cd "$suite" && apt-ftparchive -o APT::FTPArchive::Release::Origin="GPU Warden" -o APT::FTPArchive::Release::Suite=stable \
		-o APT::FTPArchive::Release::Codename=stable -o APT::FTPArchive::Release::Components=main \
		-o APT::FTPArchive::Release::Architectures="$(cd main && printf '%s ' binary-* | sed 's/binary-//g')" release .) >"$work/Release"
	mv "$work/Release" "$suite/Release"
	sign --clearsign --output "$suite/InRelease" "$suite/Release"
	sign --armor --detach-sign --output "$suite/Release.gpg" "$suite/Release"
}

make_rpm() {
	mkdir -p "$out/rpm"
	cp "$@" "$out/rpm"
	rpmsign --define "_gpg_name $key" --define "__gpg $(command -v gpg)" --addsign "$out"/rpm/*.rpm >/dev/null
	createrepo_c --quiet "$out/rpm"
	sign --armor --detach-sign --output "$out/rpm/repodata/repomd.xml.asc" "$out/rpm/repodata/repomd.xml"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
debs=() rpms=()
for package in "$@"; do
	case "$package" in
	*.deb) debs+=("$package") ;;
	*.rpm) rpms+=("$package") ;;
	*) die "$package is neither a .deb nor an .rpm" ;;
	esac
done
mkdir -p "$out"
[ ${#debs[@]} -eq 0 ] || make_apt "${debs[@]}"
[ ${#rpms[@]} -eq 0 ] || make_rpm "${rpms[@]}"
gpg --batch --armor --export "$key" >"$out/gpuwarden.asc"
echo "repository: $out: ${#debs[@]} .deb, ${#rpms[@]} .rpm, signed by $key"
