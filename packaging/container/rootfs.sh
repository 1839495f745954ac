#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# rootfs.sh DEST [fleet]: makes the image's two layers as folders, after `make setup`: DEST/base, the least of Debian 12 that
# runs Python, and DEST/agent, what the .deb installs, less what only a host has use for; with `fleet` a third, DEST/fleet, for
# the image of the fleet's service. Beside them DEST/packages.txt, which
# packages were taken, and DEST/sbom.cdx.json. PINNED=FILE, a packages.txt of before, takes exactly those again. Both ways
# to an image, build.sh and the Containerfile, go through here. Needs no root.
set -euo pipefail
cd "$(dirname "$0")/../.."

[ $# -ge 1 ] || { echo "usage: $0 DEST [fleet]" >&2; exit 2; }
dest=$1
python=.venv/bin/python
rm -rf "$dest"
mkdir -p "$dest"

PYTHONHASHSEED=0 "$python" -m tools.shipping.image.base --list "$dest/packages.txt" --cache "$dest/debs" ${PINNED:+--pinned "$PINNED"} "$dest/base"
rm -rf "$dest/debs"

packaging/tree.sh "$dest/agent"
# For people, shells and systemd on a host.
rm -rf "$dest"/agent/usr/lib/{systemd,sysusers.d,tmpfiles.d} "$dest"/agent/usr/share/{man,bash-completion,fish,zsh}
mkdir -p "$dest"/agent/{run,var/lib}/gpuwarden "$dest/agent/usr/share/doc/gpuwarden"
"$python" -m tools.shipping.image.needs "$dest/base" "$dest/agent"

whole() { # the layers $@ at once, as a container sees them
	rm -rf "$dest/whole"
	mkdir "$dest/whole"
	for layer in "$@"; do cp -al --remove-destination "$dest/$layer/." "$dest/whole/"; done
}
describe() { # the layers $@, of which the last one gets it. Debian's licences are in usr/share/doc
	local about=$dest/${*: -1}/usr/share/doc/gpuwarden
	mkdir -p "$about"
	whole "$@"
	"$python" -m tools.shipping.sbom "$dest/whole" >"$dest/sbom.cdx.json"
	whole "${@:2}"
	"$python" -m tools.shipping.licences "$dest/whole" "$about/licences"
	rm -rf "$dest/whole"
	install -m 644 -t "$about" "$dest/sbom.cdx.json"
}
describe base agent
if [ "${2:-}" = fleet ]; then
	packaging/tree.sh "$dest/fleet" fleet
	"$python" -m tools.shipping.image.needs "$dest/base" "$dest/agent" "$dest/fleet"
	describe base agent fleet
fi
