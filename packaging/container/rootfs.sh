#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# rootfs.sh DEST: makes the image's two layers as folders, after `make setup`: DEST/base, the least of Debian 12 that runs
# Python, and DEST/agent, what the .deb installs, less what only a host has use for. Beside them DEST/packages.txt, which
# packages were taken, and DEST/sbom.cdx.json. PINNED=FILE, a packages.txt of before, takes exactly those again. Both ways
# to an image, build.sh and the Containerfile, go through here. Needs no root.
set -euo pipefail
cd "$(dirname "$0")/../.."

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
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

# Both layers at once, as a container sees them.
cp -al "$dest/base" "$dest/whole"
cp -al "$dest/agent/." "$dest/whole/"
"$python" -m tools.shipping.sbom "$dest/whole" >"$dest/sbom.cdx.json"
rm -rf "$dest/whole"
install -m 644 -t "$dest/agent/usr/share/doc/gpuwarden" "$dest/sbom.cdx.json"
"$python" -m tools.shipping.licences "$dest/agent" "$dest/agent/usr/share/doc/gpuwarden/licences" # Debian's have theirs in usr/share/doc
