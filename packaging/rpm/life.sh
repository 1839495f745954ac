#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# life.sh OUT: the .rpm packages of OUT in a bare system: this machine's rpm installs them there, into a database of their
# own, `gpuwarden doctor` and the demo run, and removing them leaves every file as before. The system is a Debian 11, which
# has glibc, libelf and zlib as RHEL 9 has them, but not as packages that rpm knows: hence --nodeps. All mounts live in a
# mount namespace that ends with this script.
set -euo pipefail
cd "$(dirname "$0")/../.."
. packaging/debian-system.sh

[ $# -ge 1 ] || die "usage: $0 OUT"
out=$(realpath "$1")
root=$out/root
step() { printf '%s\n' "$1"; }
inside() { in_system "$root" "$@"; }
fail() { echo "$*" >&2; exit 1; }
into_root() { rpm --root "$root" --dbpath /var/lib/rpm-of-the-test "$@"; }
note_files() { (cd "$root" && find . -xdev \( -path ./var/lib/rpm-of-the-test -o -path ./var/cache -o -path ./var/log \) -prune -o -printf '%p %y %m %U:%G %l\n' |
	grep -vE '^\./etc/(group|gshadow|passwd|shadow)-? ' | sort); }

live() {
	step "a bare system"
	[ -e "$out/system" ] || suite=bullseye make_system "$out/system" libelf1,procps,runc,zlib1g
	rm -rf "$root"
	cp -a "$out/system" "$root"
	mount_system "$root"
	note_files >"$out/before"
	step "rpm installs gpuwarden and gpuwarden-sim"
	into_root --initdb
	into_root --nodeps -i "$out"/*.rpm
	[ "$(inside gpuwarden --version)" = "gpuwarden $(packaging/version.sh)" ] || fail "it says another version"
	inside gpuwarden check /etc/gpuwarden/policy.yaml
	into_root -V --nodeps gpuwarden gpuwarden-sim || fail "files are not as they were packaged"
	step "gpuwarden doctor"
	inside gpuwarden doctor || [ $? -le 5 ] || fail "doctor broke"
	step "the demo"
	inside gpuwarden demo --plain --seconds 8 >"$out/demo.log" || fail "$(tail -n 20 "$out/demo.log")"
	step "an upgrade to the same keeps the policy"
	echo "# ours" >>"$root/etc/gpuwarden/policy.yaml"
	into_root --nodeps -U --replacepkgs "$out"/*.rpm
	[ "$(tail -n 1 "$root/etc/gpuwarden/policy.yaml")" = "# ours" ] || fail "the upgrade has changed the policy"
	step "removing leaves nothing but the policy"
	into_root -e gpuwarden-sim gpuwarden
	rm -rf "$root/etc/gpuwarden" "$root/var/lib/gpuwarden"
	note_files >"$out/after"
	diff "$out/before" "$out/after" || fail "removing has left something"
	echo "rpm-life: done in $SECONDS s"
}

case "${2:-}" in
--inside) live ;;
*)
	[ "$(id -u)" -eq 0 ] || die "run as root"
	exec unshare --mount --propagation private "packaging/rpm/$(basename "$0")" "$out" --inside
	;;
esac
