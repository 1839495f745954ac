#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# The chart's whole life on a real Kubernetes 1.20 of one node, a line for each step: `life.sh IMAGE [CACHE]`.
# IMAGE: an OCI layout (make image) or an archive of one. CACHE: where Kubernetes is built, once.
set -euo pipefail
cd "$(dirname "$0")/../../.."
image=$(realpath "${1:?usage: $0 IMAGE [CACHE]}")
cache=${2:-/var/tmp/gw-kubernetes}
packaging/kubernetes/trial/build.sh "$cache"
helm=$(packaging/kubernetes/tools.sh helm)
folder=$(mktemp -d -t gw-kubernetes.XXXXXX)
# What the node has in these places is its own: the agent of this machine, if there is one, is not met, and nothing is left.
places=(/var/lib/kubelet /var/lib/gpuwarden /var/lib/cni /var/log/pods /var/log/containers)
made=()
trap 'rm -rf "$folder"; [ ${#made[@]} -eq 0 ] || rmdir --ignore-fail-on-non-empty "${made[@]}"' EXIT
for place in "${places[@]}"; do
	[ -e "$place" ] || { mkdir "$place" && made+=("$place"); }
done
export PLACES="/run ${places[*]}"
unshare --mount --net --propagation private bash -c '
	for place in $PLACES; do mount -t tmpfs -o mode=755 none "$place" && mount --make-rshared "$place"; done
	mkdir -p /run/containerd
	exec "$@"' life "$PWD/.venv/bin/python" -m tools.shipping.kubernetes.life "$folder" "$cache/bin" "$helm" "$image"
