#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# fresh-machine.sh DIR COMMAND…: runs the command in a fresh clone of this repository on a Debian 12 that has nothing but
# git, make and python3, to prove that the project installs whatever else it needs. The system is made in DIR/debian on
# the first call (`rm -rf DIR/debian` for a fresh one again); only what is committed is cloned. The kernel, its cgroups
# and the network are this machine's. All mounts live in a mount namespace that ends with the last process inside.
set -euo pipefail

suite=bookworm
die() { echo "fresh-machine: $*" >&2; exit 1; }

make_system() { # $1: where
	command -v debootstrap >/dev/null || die "install debootstrap first: apt-get install debootstrap"
	local mirror
	mirror=$(sed -nE 's/^(URIs:|deb( \[[^]]*\])?) *(https?:[^ ]+).*/\3/p' /etc/apt/sources.list.d/debian.sources \
		/etc/apt/sources.list 2>/dev/null | head -n 1 || true)
	echo "fresh-machine: making a minimal Debian ($suite) in $1"
	debootstrap --variant=minbase --include=git,make,python3,ca-certificates "$suite" "$1.partial" \
		${mirror:+"$mirror"} >"$1.log" 2>&1 || { tail -n 5 "$1.log" >&2; die "debootstrap failed: $1.log"; }
	mv "$1.partial" "$1"
}

# Packages come the same way as on this machine: sources, proxies, certificates, name resolution.
borrow_settings() { # $1: the system
	local path
	rm -f "$1/etc/apt/sources.list"
	for path in /etc/apt /etc/pip.conf /etc/ssl/certs/ca-certificates.crt \
		/usr/local/share/ca-certificates /etc/resolv.conf /etc/hosts; do
		[ -e "$path" ] || continue
		mkdir -p "$1$(dirname "$path")"
		cp -aL --remove-destination "$path" "$1$(dirname "$path")/"
	done
}

passed_on() { # the variables that package managers and TLS clients listen to
	env | grep -E '^(PIP_|[A-Z_]*(CA_BUNDLE|CERT_FILE|CERT_DIR|CAINFO|CA_CERTS)=|(https?|no|all)_proxy=|CI=|TERM=)' || true
}

# In a mount namespace of its own: the system becomes the root. A real root and not a chroot, since container runtimes
# change roots themselves and the kernel lets them do that only from a mount point.
enter() { # $1: the system, then the command
	local system=$1
	shift
	mount --bind "$system" "$system"
	cd "$system"
	mount -t proc proc proc
	for path in sys dev; do mount --rbind "/$path" "$path" && mount --make-rslave "$path"; done
	mount -t tmpfs tmpfs run
	mount -t tmpfs tmpfs tmp
	mkdir -p run/old
	local variables
	mapfile -t variables < <(passed_on)
	local root=/
	if pivot_root . run/old 2>/dev/null; then
		umount -l run/old
	else # this machine runs from its initial RAM disk
		root=.
	fi
	exec chroot "$root" env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
		"${variables[@]}" bash -c 'cd /gpuwarden && exec "$@"' fresh-machine "$@"
}

if [ "${1:-}" = --inside ]; then
	shift
	enter "$@"
fi
[ $# -ge 2 ] || die "usage: $0 DIR COMMAND…, for example: $0 /var/tmp/fresh make test"
[ "$(id -u)" -eq 0 ] || die "run as root"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
system=$folder/debian
[ -e "$system" ] || make_system "$system"
borrow_settings "$system"
rm -rf "$system/gpuwarden"
git clone --quiet --no-hardlinks "$(dirname "$0")/.." "$system/gpuwarden"
exec unshare --mount --propagation private "$0" --inside "$system" "$@"
