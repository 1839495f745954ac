#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# runtime.sh WORK: builds in WORK/root what the packages bring along beside our own code, so that they need nothing of a
# distribution but libc, libelf and zlib: Python 3.11, OpenSSL 3, libffi and libbpf 1 out of Debian 12's sources, and
# SQLite as Debian 11 has it. All of it is compiled in a Debian 11, for its glibc (2.31) is the oldest of the systems that
# the packages are for, and lies in /usr/lib/gpuwarden/python, where no linker looks: the interpreter's DT_RPATH leads
# there. Takes a quarter of an hour once; a source that is compiled already is kept (`rm -rf WORK` for newer ones).
#
# runtime.sh WORK --simulator SIM: compiles the simulated GPU in the same Debian 11, into SIM/build.
set -euo pipefail
cd "$(dirname "$0")/.."
. packaging/debian-system.sh

[ $# -ge 1 ] || die "usage: $0 WORK [--simulator SIM]"
work=$(realpath -m "$1")
prefix=/usr/lib/gpuwarden/python
sources=(openssl libffi libbpf python3.11)
system=$work/system

# Signed by Debian's key, as apt checks: whatever is newest of the suite and its security updates, or of the suite alone
# where this machine's mirror of the updates has no sources; a point release brings them into the suite.
fetch_sources() {
	download_sources "$(mirror) bookworm" "$(mirror -security) bookworm-security" ||
		{ echo "runtime: no sources of the security updates: those of the last point release are taken" >&2 &&
			download_sources "$(mirror) bookworm"; }
	local name description
	for name in "${sources[@]}"; do
		description=$(basename "$work/sources/$name"_*.dsc)
		[ -e "$system/build/$description" ] && continue
		rm -rf "$system/build/$name"
		dpkg-source --no-check -x "$work/sources/$description" "$system/build/$name" >/dev/null
		cp "$work/sources/$description" "$system/build"
	done
}

download_sources() { # archives: URL and suite each
	local options=(-o Dir::State::Lists="$work/lists" -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=-
		-o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3)
	local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
	rm -rf "$work/lists" "$work/sources"
	mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/sources"
	printf "deb-src [signed-by=$keyring] %s main\n" "$@" >"$work/sources.list"
	apt-get -qq "${options[@]}" update
	(cd "$work/sources" && apt-get -qq "${options[@]}" --download-only source "${sources[@]}")
}

# In the Debian 11. /etc/ssl is where Debian has the certificates that a machine trusts; RHEL has a link there.
compile_openssl() {
	[ -e Makefile ] || ./Configure --prefix=$prefix --libdir=lib --openssldir=/etc/ssl shared no-tests no-legacy no-engine no-comp
	make -s -j"$jobs" build_libs
	make -s install_dev
}
compile_libffi() {
	./configure --quiet --prefix=$prefix --libdir=$prefix/lib --disable-static --disable-multi-os-directory --disable-docs
	make -s -j"$jobs"
	make -s install
}
compile_libbpf() { make -s -C src -j"$jobs" PREFIX=$prefix LIBDIR=$prefix/lib install; }
compile_python3.11() {
	PKG_CONFIG_PATH=$prefix/lib/pkgconfig ./configure --quiet --prefix=$prefix --with-openssl=$prefix --with-openssl-rpath=no \
		--disable-test-modules --without-ensurepip --without-doc-strings --without-static-libpython
	make -s -j"$jobs"
	make -s install
}
compile_sources() { # each by its function above, in its folder
	export LDFLAGS="-Wl,--disable-new-dtags,-rpath,$prefix/lib" CFLAGS="-O2 -fstack-protector-strong -D_FORTIFY_SOURCE=2"
	local name
	for name in "$@"; do
		cd "/build/$name"
		[ -e .compiled ] || "compile_$name"
		touch .compiled
	done
	cp -L /usr/lib/*-linux-gnu/libsqlite3.so.0 $prefix/lib
}

make_runtime() {
	[ -e "$system" ] || suite=bullseye make_system "$system" \
		ca-certificates,file,gcc,libc6-dev,libelf-dev,libsqlite3-dev,make,patch,perl,pkg-config,xz-utils,zlib1g-dev
	rm -rf "$work/root"
	mkdir -p "$system/build"
	fetch_sources
	{
		declare -f compile_{openssl,libffi,libbpf,python3.11,sources}
		printf 'set -euo pipefail\nprefix=%s jobs=%s\ncompile_sources %s\n' "$prefix" "$(nproc)" "${sources[*]}"
	} >"$system/build/compile.sh"
	mount_system "$system"
	in_system "$system" bash /build/compile.sh
	mkdir -p "$work/root$prefix/bin" "$work/root$prefix/lib"
	cp -a "$system$prefix/bin/python3.11" "$work/root$prefix/bin"
	cp -a "$system$prefix/lib/python3.11" "$system$prefix"/lib/lib{bpf,crypto,ssl,ffi,sqlite3}.so* "$work/root$prefix/lib"
	describe_parts
	touch "$work/root/complete"
}

# For the list of parts and the licences: a status file of dpkg and a copyright file for each source.
describe_parts() {
	local name version
	for name in "${sources[@]}"; do
		version=$(sed -n 's/^Version: //p' "$work/sources/$name"_*.dsc | head -n 1)
		describe_part "$name" "$version" "$system/build/$name/debian/copyright"
	done
	version=$(dpkg-query --admindir="$system/var/lib/dpkg" -W -f '${Version}' libsqlite3-0)
	describe_part libsqlite3-0 "$version" "$system/usr/share/doc/libsqlite3-0/copyright"
}

describe_part() { # name, version, its copyright file
	local parts=$work/root/parts
	mkdir -p "$parts/var/lib/dpkg/status.d" "$parts/usr/share/doc/$1"
	cp -L "$3" "$parts/usr/share/doc/$1/copyright"
	printf 'Package: %s\nStatus: install ok installed\nVersion: %s\nArchitecture: %s\n' "$1" "$2" "$(dpkg --print-architecture)" \
		>"$parts/var/lib/dpkg/status.d/$1"
}

compile_simulator() { # $1: sim/ of some copy of the tree
	rm -rf "$system/build/sim"
	cp -a "$1" "$system/build/sim"
	rm -rf "$system/build/sim/build"
	chroot "$system" make -s -C /build/sim -j"$(nproc)"
	rm -rf "$1/build"
	cp -a "$system/build/sim/build" "$1/build"
}

case "${2:-}" in
--simulator) compile_simulator "$(realpath "$3")" ;;
--inside) make_runtime ;;
*)
	[ "$work/root/complete" -nt packaging/runtime.sh ] && exit 0
	[ "$(id -u)" -eq 0 ] || die "run as root"
	mkdir -p "$work"
	echo "runtime: building Python and the libraries below it in a Debian 11 (log: $work/log)"
	unshare --mount --propagation private "packaging/$(basename "$0")" "$work" --inside >"$work/log" 2>&1 ||
		{ tail -n 20 "$work/log" >&2; die "failed; all of it is in $work/log"; }
	;;
esac
