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
trap 'rm -rf "$folder"' EXIT
# What the node has below /run and /var/lib is its own: the agent of this machine, if there is one, is not met.
mkdir -p /var/lib/kubelet /var/lib/gpuwarden
unshare --mount --net --propagation private bash -c '
	for place in /run /var/lib/kubelet /var/lib/gpuwarden; do mount -t tmpfs -o mode=755 none "$place" && mount --make-rshared "$place"; done
	mkdir -p /run/containerd
	exec "$@"' life "$PWD/.venv/bin/python" -m tools.shipping.kubernetes.life "$folder" "$cache/bin" "$helm" "$image"
