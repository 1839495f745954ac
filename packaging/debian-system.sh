# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# To be sourced: a minimal Debian in a folder, and what a command inside needs of this machine.

suite=${DEBIAN_SUITE:-bookworm}
die() { echo "$(basename "$0" .sh): $*" >&2; exit 1; }

# Where this machine has its packages from.
mirror() { # $1: -security, for the archive of security updates
	local url
	url=$(sed -nE 's/^(URIs:|deb( \[[^]]*\])?) *(https?:[^ ]+).*/\3/p' /etc/apt/sources.list.d/debian.sources \
		/etc/apt/sources.list 2>/dev/null | grep -v -e -security | head -n 1 || true)
	[ -n "$url" ] || die "apt has no archive of packages here: name one in /etc/apt/sources.list"
	echo "$url${1:-}"
}

make_system() { # $1: where; $2: packages besides the minimal ones, with commas
	command -v debootstrap >/dev/null || die "install debootstrap first: apt-get install debootstrap"
	local archive
	archive=$(mirror)
	echo "$(basename "$0" .sh): making a minimal Debian ($suite) in $1"
	rm -rf "$1.partial"
	debootstrap --variant=minbase --include="$2" "$suite" "$1.partial" \
		"$archive" >"$1.log" 2>&1 || { tail -n 5 "$1.log" >&2; die "debootstrap failed: $1.log"; }
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
	find "$1"/etc/apt/sources.list* -type f -exec sed -i "s/bookworm/$suite/g" {} + # what this machine is
}

# In a mount namespace of its own: the system is a mount point, with this machine's kernel below it.
mount_system() { # $1: the system
	local path
	mount --bind "$1" "$1"
	mount -t proc proc "$1/proc"
	for path in sys dev; do mount --rbind "/$path" "$1/$path" && mount --make-rslave "$1/$path"; done
	mount -t tmpfs tmpfs "$1/run"
	mount -t tmpfs tmpfs "$1/tmp"
}

passed_on() { # the variables that package managers and TLS clients listen to
	env | grep -E '^(PIP_|[A-Z_]*(CA_BUNDLE|CERT_FILE|CERT_DIR|CAINFO|CA_CERTS)=|(https?|no|all)_proxy=|CI=|TERM=)' || true
}

# A command with an environment of its own, in a system that is mounted.
in_system() { # $1: the system, then the command
	local variables system=$1
	shift
	mapfile -t variables < <(passed_on)
	chroot "$system" env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
		"${variables[@]}" "$@"
}
