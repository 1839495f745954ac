#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# `build.sh DIR` makes DIR/bin: the five programs of Kubernetes 1.20, from the source package of Debian 12, which ships only
# kubectl in binary form. About five minutes on two cores, once; some 3 GB while it builds, 0.5 GB afterwards.
set -euo pipefail
dir=${1:?usage: $0 DIR}
programs=(kubelet kube-scheduler kube-controller-manager kube-apiserver kubectl)
for program in "${programs[@]}"; do [ -x "$dir/bin/$program" ] || missing=1; done
[ -n "${missing:-}" ] || exit 0

packages=(containerd containernetworking-plugins dpkg-dev etcd-server golang-go iproute2 runc)
dpkg-query -W -f '${Status}\n' "${packages[@]}" 2>/dev/null | grep -c '^install ok installed' | grep -qx ${#packages[@]} ||
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}" >/dev/null

mkdir -p "$dir/apt/lists/partial" "$dir/apt/parts" "$dir/bin" "$dir/source" "$dir/go/src/k8s.io"
cd "$dir/source"
sources=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
sed -E 's/^Types: deb$/Types: deb-src/; s/^deb /deb-src /' <<<"$sources" >"$dir/apt/sources.sources"
grep -q '^Types:' "$dir/apt/sources.sources" || mv "$dir/apt/sources.sources" "$dir/apt/sources.list"
apt=(apt-get -qq -o Dir::Etc::sourceparts="$dir/apt/parts" -o Dir::State::lists="$dir/apt/lists")
if [ -e "$dir/apt/sources.list" ]; then
	apt+=(-o Dir::Etc::sourcelist="$dir/apt/sources.list")
else
	mv "$dir/apt/sources.sources" "$dir/apt/parts/debian.sources"
	apt+=(-o Dir::Etc::sourcelist=/dev/null)
fi
"${apt[@]}" update
"${apt[@]}" source --download-only kubernetes
dpkg-source --no-check -x kubernetes_*.dsc "$dir/go/src/k8s.io/kubernetes" >/dev/null

export GOPATH=$dir/go GO111MODULE=off CGO_ENABLED=0 GOCACHE=$dir/cache GOFLAGS=
GOROOT=$(go env GOROOT)
export GOROOT
cd "$GOPATH/src/k8s.io/kubernetes"
version=$(sed -nE 's/^kubernetes .([0-9.]+\+really)?([0-9.]+).*/v\2/p' debian/changelog | head -1)
variables="-X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=20"
variables+=" -X k8s.io/client-go/pkg/version.gitVersion=$version"
build() { go build -p "$(nproc)" -ldflags "-s -w $variables" -o "$dir/bin/" "$@"; }

# What the API server says of its own types is generated, and not in the package.
go build -o "$dir/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(grep -rl --include=doc.go --include=types.go --include=*.go '+k8s:openapi-gen=true' pkg staging/src vendor/k8s.io 2>/dev/null |
	grep -v -e /testdata/ -e _test.go -e /code-generator/ -e /kube-openapi/ -e sample- | xargs -n1 dirname | sort -u |
	sed -e 's#^staging/src/#k8s.io/kubernetes/vendor/#; t' -e 's#^#k8s.io/kubernetes/#' | sort -u | paste -sd,)
mkdir -p pkg/generated/openapi
"$dir/openapi-gen" --logtostderr -h hack/boilerplate/boilerplate.generatego.txt -O zz_generated.openapi \
	-p k8s.io/kubernetes/pkg/generated/openapi -i "$inputs" -r "$dir/openapi-report"
build ./cmd/kubelet ./cmd/kube-scheduler ./cmd/kube-controller-manager ./cmd/kube-apiserver ./cmd/kubectl
chmod -R u+w "$dir/cache" "$dir/go"
rm -rf "$dir/cache" "$dir/go" "$dir/source" "$dir/apt" "$dir/openapi-gen" "$dir/openapi-report"
