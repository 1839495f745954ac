#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# `build.sh DIR` makes DIR/bin: the five programs of Kubernetes 1.20, from the source package of Debian 12, which ships only
# kubectl in binary form. About five minutes on two cores, once; some 3 GB while it builds, 0.5 GB afterwards.
set -euo pipefail
dir=${1:?usage: $0 DIR}

setup=$(dirname "$(realpath "$0")")/../../setup.sh
"$setup" node

programs=(kubelet kube-scheduler kube-controller-manager kube-apiserver kubectl)
for program in "${programs[@]}"; do [ -x "$dir/bin/$program" ] || missing=1; done
[ -n "${missing:-}" ] || exit 0

"$setup" node-build
mkdir -p "$dir/bin"
tree=$dir/go/src/k8s.io/kubernetes

fetch() { # the source package, through lists of our own: the machine's sources need not name source packages
	mkdir -p "$dir/apt/lists/partial" "$dir/apt/parts" "$dir/source" "$(dirname "$tree")"
	cd "$dir/source"
	sed -E 's/^Types: deb$/Types: deb-src/; s/^deb /deb-src /' <<<"$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null)" \
		>"$dir/apt/parts/debian.sources"
	sed -E 's/^deb /deb-src /' <<<"$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null)" >"$dir/apt/parts/debian.list"
	local options=(-qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$dir/apt/parts" -o Dir::State::lists="$dir/apt/lists")
	apt-get "${options[@]}" update
	apt-get "${options[@]}" source --download-only kubernetes
	rm -rf "$tree.partial"
	dpkg-source --no-check -x kubernetes_*.dsc "$tree.partial" >/dev/null
	mv "$tree.partial" "$tree"
}
[ -d "$tree" ] || (fetch)

export GOPATH=$dir/go GO111MODULE=off CGO_ENABLED=0 GOCACHE=$dir/cache GOFLAGS=
GOROOT=$(go env GOROOT)
export GOROOT
cd "$tree"
version=$(sed -nE 's/^kubernetes .([0-9.]+\+really)?([0-9.]+).*/v\2/p' debian/changelog | head -1)
variables="-X k8s.io/kubernetes/vendor/k8s.io/component-base/version.gitVersion=$version -X k8s.io/kubernetes/vendor/k8s.io/component-base/version.gitMajor=1 -X k8s.io/kubernetes/vendor/k8s.io/component-base/version.gitMinor=20"
variables+=" -X k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version.gitVersion=$version"
build() { # without the clouds' own volumes and balancers: half of the code
	go build -p "$(nproc)" -tags providerless -ldflags "-s -w $variables" -o "$dir/bin/" "$@"
}

generate() { # what the API server says of its own types, which is not in the package
	go build -o "$dir/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
	local packages
	packages=$(grep -rl --include='*.go' '+k8s:openapi-gen=true' pkg staging/src vendor/k8s.io 2>/dev/null |
		grep -v -e /testdata/ -e _test.go -e /code-generator/ -e /kube-openapi/ -e sample- | xargs -n1 dirname | sort -u |
		sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#; t' -e 's#^#k8s.io/kubernetes/#' | sort -u | paste -sd,)
	"$dir/openapi-gen" --logtostderr -h hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi \
		-p k8s.io/kubernetes/pkg/generated/openapi -i "$packages" -r "$dir/openapi-report"
}
[ -e pkg/generated/openapi/zz_generated.openapi.go ] || generate
build ./cmd/kubelet ./cmd/kube-scheduler ./cmd/kube-controller-manager ./cmd/kube-apiserver ./cmd/kubectl
chmod -R u+w "$dir/cache" "$dir/go"
rm -rf "$dir/cache" "$dir/go" "$dir/source" "$dir/apt" "$dir/openapi-gen" "$dir/openapi-report"
