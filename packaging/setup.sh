#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# Makes sure that the Debian packages for a purpose are there: `setup.sh build` (build and run), `setup.sh test` (what only
# linting and testing need), `setup.sh fuzz` (libFuzzer), `setup.sh kernels` (to boot kernels of two architectures), `setup.sh deb` (to make Debian packages and try them in a fresh
# Debian), `setup.sh rpm` (to make the others), `setup.sh node` (what a node of Kubernetes consists of, but for Kubernetes) or `setup.sh node-build` (to build
# that). Silent and quick when nothing is missing.
set -euo pipefail

build=(ca-certificates clang gcc git libbpf-dev libbpf1 libc6-dev libelf-dev linux-libc-dev llvm make python3 python3-venv runc)
test=(apt-utils busybox-static chromium clang-format containerd createrepo-c docker.io fish fonts-dejavu-core gnupg mandoc podman prometheus python3-bpfcc rpm strace systemd tmux zsh zstd)
fuzz=(clang libclang-rt-dev)
kernels=(busybox-static debian-archive-keyring qemu-system-arm qemu-system-x86)
deb=(debhelper debian-archive-keyring debootstrap dpkg-dev lintian)
rpm=(debian-archive-keyring debootstrap dpkg-dev rpm)
node=(containerd containernetworking-plugins etcd-server iproute2 runc)
node_build=(dpkg-dev golang-go)
case "$(uname -m)" in # the kernel's headers of the other architecture, for `make bpf-check`
aarch64) test+=(linux-libc-dev-amd64-cross) ;;
*) test+=(linux-libc-dev-arm64-cross qemu-system-x86) ;; # and to boot other kernels
esac

case "${1:-}" in
build) wanted=("${build[@]}") ;;
test) wanted=("${build[@]}" "${test[@]}") ;;
fuzz) wanted=("${fuzz[@]}") ;;
deb) wanted=("${build[@]}" "${deb[@]}") ;;
rpm) wanted=("${build[@]}" "${rpm[@]}") ;;
node) wanted=("${node[@]}") ;;
node-build) wanted=("${node_build[@]}") ;;
*) echo "usage: $0 build|test|fuzz|kernels|deb|rpm|node|node-build" >&2; exit 2 ;;
esac

missing=()
if command -v dpkg-query >/dev/null; then
	installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${wanted[@]}" 2>/dev/null || true)
	for package in "${wanted[@]}"; do
		grep -qx "$package installed" <<<"$installed" || missing+=("$package")
	done
else
	for tool in clang gcc llvm-strip runc python3; do
		command -v "$tool" >/dev/null || missing+=("$tool")
	done
	[ ${#missing[@]} -eq 0 ] && exit 0
	echo "setup: this is not Debian; install what provides ${missing[*]}, libbpf 1.x with its headers, and Python's venv, then run make again" >&2
	exit 1
fi
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
	echo "setup: run as root: apt-get install --no-install-recommends ${missing[*]}" >&2
	exit 1
fi

# Packages that bring a daemon (prometheus) would start it where init scripts run; we only want the programs.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
fi

log=$(mktemp -t gpuwarden-setup.XXXXXX)
install_missing() {
	DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 \
		install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1 </dev/null
}
update_lists() {
	apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update >>"$log" 2>&1 </dev/null
}

echo "setup: installing ${missing[*]} (log: $log)"
# A fresh machine has no package lists, an old one stale ones, and another apt may hold the lists: three tries cure all.
for pause_seconds in 0 10 60; do
	sleep "$pause_seconds"
	if install_missing || { echo "setup: updating the package lists"; update_lists && install_missing; }; then
		rm -f "$log"
		exit 0
	fi
done
tail -n 20 "$log" >&2
echo "setup: apt-get could not install ${missing[*]}; its last lines are above, all of it is in $log" >&2
exit 1
