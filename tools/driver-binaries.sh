#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# driver-binaries.sh DIR: NVIDIA's libcuda, NVML and MPS daemon of three drivers, for tests/driver and bench. They run
# without a GPU, as far as cuInit. From Debian's component non-free, under NVIDIA's licence (a copy lies beside each);
# checked by apt, installed nowhere, and no part of anything that GPU Warden ships. And nvtop, a reader of NVML, which is
# in contrib as it is of no use without these.
#
# DIR/MAJOR is what a driver consists of. What cannot be had is named in DIR/missing, and does not fail: the tests that
# need it say why they are skipped.
set -euo pipefail
dir=$(realpath -m "${1:?usage: driver-binaries.sh DIR}")
declare -A sources=([535]="bookworm non-free" [550]="trixie non-free" [555]="experimental non-free" [nvtop]="bookworm contrib")
driver=(libcuda1 libnvidia-ml1 libnvidia-ptxjitcompiler1 nvidia-cuda-mps nvidia-smi)
key=/usr/share/keyrings/debian-archive-keyring.gpg

wanted=()
for name in "${!sources[@]}"; do [ -d "$dir/$name" ] || wanted+=("$name"); done
[ ${#wanted[@]} -eq 0 ] && exit 0
mkdir -p "$dir"
: >"$dir/missing"
missing() {
	echo "driver-binaries: $*" | tee -a "$dir/missing" >&2
}

if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null; then
	missing "Debian's packages of the driver are for x86-64 and fetched by apt"
	exit 0
fi
# shellcheck disable=SC2016 # apt's own variable
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep '/debian/*$' | head -n 1 || true)
if [ -z "$mirror" ]; then
	missing "apt has no source that ends with /debian: run \`apt-get update\`"
	exit 0
fi
echo "driver-binaries: fetching ${wanted[*]} (the user space of NVIDIA's drivers is in Debian's non-free, under NVIDIA's licence)"

work=$(mktemp -d -t gpuwarden-driver.XXXXXX)
trap 'rm -rf "$work"' EXIT
fetch() { # in a condition `set -e` does nothing
	local name=$1 state=$work/$1 version packages=("$1")
	[ "$name" = nvtop ] || packages=("${driver[@]}")
	mkdir -p "$state"/{etc/sources.list.d,lists/partial,cache/archives/partial,debs,root}
	touch "$state/status"
	echo "deb [arch=amd64 signed-by=$key] $mirror ${sources[$name]}" >"$state/etc/sources.list"
	local options=(-qq -o "Dir::Etc=$state/etc" -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status"
		-o "Dir::Cache=$state/cache" -o APT::Architecture=amd64 -o APT::Sandbox::User=root -o Acquire::Retries=3)
	apt-get "${options[@]}" update || return
	(cd "$state/debs" && apt-get "${options[@]}" download "${packages[@]}") || return
	for deb in "$state"/debs/*.deb; do dpkg-deb -x "$deb" "$state/root" || return; done
	version=$(dpkg-deb -f "$state/debs/${packages[0]}"_*.deb Version)
	if [ "$name" != nvtop ] && [ "${version%%.*}" != "$name" ]; then
		echo "${sources[$name]} has $version now"
		return 1
	fi
	mv "$state/root" "$dir/$name"
}
for name in "${wanted[@]}"; do
	if ! fetch "$name" >"$work/log" 2>&1; then
		missing "$name cannot be had from ${sources[$name]}: $(tail -n 1 "$work/log")"
	fi
done
