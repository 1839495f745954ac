#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# What a trial needs around it: Kubernetes, helm, and namespaces in which this node's own places are not seen.
# `trial.sh MODULE [WORD…]` runs that module of tools/shipping/kubernetes there, with a folder for its files, the folder of
# Kubernetes' programs, helm, and the words. KUBERNETES_CACHE: where Kubernetes is built, once.
set -euo pipefail
cd "$(dirname "$0")/../../.."
module=${1:?usage: $0 MODULE [WORD…]}
shift
cache=${KUBERNETES_CACHE:-/var/tmp/gw-kubernetes}
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
	exec "$@"' trial "$PWD/.venv/bin/python" -m "tools.shipping.kubernetes.$module" "$folder" "$cache/bin" "$helm" "$@"
