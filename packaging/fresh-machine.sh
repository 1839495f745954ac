#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# fresh-machine.sh DIR COMMAND…: runs the command in a fresh clone of this repository on a Debian 12 that has nothing but
# git, make and python3, to prove that the project installs whatever else it needs. The system is made in DIR/debian on
# the first call (`rm -rf DIR/debian` for a fresh one again); only what is committed is cloned. The kernel, its cgroups
# and the network are this machine's. All mounts live in a mount namespace that ends with the last process inside.
set -euo pipefail

. "$(dirname "$0")/debian-system.sh"

# In a mount namespace of its own: the system becomes the root. A real root and not a chroot, since container runtimes
# change roots themselves and the kernel lets them do that only from a mount point.
enter() { # $1: the system, then the command
	local system=$1
	shift
	mount_system "$system"
	cd "$system"
	mkdir -p run/old
	local root=/
	if pivot_root . run/old 2>/dev/null; then
		umount -l run/old
	else # this machine runs from its initial RAM disk
		root=.
	fi
	in_system "$root" bash -c 'cd /gpuwarden && exec "$@"' fresh-machine "$@"
}

if [ "${1:-}" = --inside ]; then
	shift
	enter "$@"
	exit
fi
[ $# -ge 2 ] || die "usage: $0 DIR COMMAND…, for example: $0 /var/tmp/fresh make test"
[ "$(id -u)" -eq 0 ] || die "run as root"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
system=$folder/debian
[ -e "$system" ] || make_system "$system" git,make,python3,ca-certificates
borrow_settings "$system"
rm -rf "$system/gpuwarden"
git clone --quiet --no-hardlinks "$(dirname "$0")/.." "$system/gpuwarden"
exec unshare --mount --propagation private "$0" --inside "$system" "$@"
