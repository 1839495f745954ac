#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# Writes what is made from the chart: the version in Chart.yaml and in the example, base/gpuwarden.yaml, monitoring/podmonitor.yaml.
# `render.sh DIR` writes the latter two into DIR instead. The head of each names the sources by their hash, so that a test
# without helm can tell when they are stale.
set -euo pipefail
cd "$(dirname "$0")"
helm=$(./tools.sh helm)
oldest=1.30.0 # securityContext.appArmorProfile

if [ $# -eq 0 ]; then
	version=$(../version.sh)
	sed -i -E "s/^(version|appVersion): .*/\1: $version/" chart/Chart.yaml
	sed -i -E "s/newTag: [^}]*/newTag: $version/" examples/enforce/kustomization.yaml
fi
out=${1:-.}
mkdir -p "$out/base" "$out/monitoring"

head() {
	cat <<-END
		# SPDX-License-Identifier: Apache-2.0
		# SPDX-FileCopyrightText: The GPU Warden authors
		#
		# Generated from chart/ by \`make kubernetes\`; do not edit. Sources: $(./sources.sh)
	END
}

template() { # what helm says of links is of no interest: where rules and dashboards lie is meant
	"$helm" template gpuwarden chart --namespace gpuwarden --kube-version "$oldest" "$@" 2> >(grep -v 'symbolic link' >&2) |
		sed '/^# Source: /d'
}

{ head; template; } >"$out/.base.yaml"
{ head; template --set podMonitor.enabled=true --show-only templates/podmonitor.yaml; } >"$out/.podmonitor.yaml"
mv "$out/.base.yaml" "$out/base/gpuwarden.yaml"
mv "$out/.podmonitor.yaml" "$out/monitoring/podmonitor.yaml"
