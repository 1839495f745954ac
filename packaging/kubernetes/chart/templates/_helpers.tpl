{{- /*
SPDX-License-Identifier: Apache-2.0
SPDX-FileCopyrightText: The GPU Warden authors
*/ -}}

{{- define "gpuwarden.selector" -}}
app.kubernetes.io/name: gpuwarden
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpuwarden.labels" -}}
{{ include "gpuwarden.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "gpuwarden.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* Where each runtime's socket is. The directory, since a runtime that is restarted makes a new socket. */}}
{{- define "gpuwarden.runtime" -}}
containerd: /run/containerd
crio: /run/crio
k3s: /run/k3s/containerd
k0s: /run/k0s
microk8s: /var/snap/microk8s/common/run
docker: /run/docker.sock
{{- end }}

{{- /* Where the kubelet's directory is. Two bring a kubelet that has another. */}}
{{- define "gpuwarden.kubelet" -}}
{{- $others := dict "k0s" "/var/lib/k0s/kubelet" "microk8s" "/var/snap/microk8s/common/var/lib/kubelet" }}
{{- .Values.kubeletDirectory | default (get $others .Values.runtime) | default "/var/lib/kubelet" }}
{{- end }}

{{- /* Both containers have to be able to do, and to undo, the same. docs/capabilities.md says what each is for. */}}
{{- define "gpuwarden.container" -}}
image: {{ include "gpuwarden.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - {name: NVIDIA_VISIBLE_DEVICES, value: all}
  - {name: NVIDIA_DRIVER_CAPABILITIES, value: "utility,compute"}
securityContext:
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsUser: 0
  runAsGroup: 0
  capabilities:
    drop: [ALL]
    add: [SYS_ADMIN, SYS_PTRACE, KILL, DAC_READ_SEARCH, SYS_NICE]
  seccompProfile: {type: RuntimeDefault}
  {{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
  appArmorProfile: {type: Unconfined}
  {{- end }}
  {{- with .Values.seLinuxOptions }}
  seLinuxOptions: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* What the kubelet asks. It needs no password for that, but it has no certificate to show. */}}
{{- define "gpuwarden.probe" -}}
{{- $web := (index . 0).Values.webConfig }}
{{- if $web.clientCertificates -}}
tcpSocket: {port: metrics}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: metrics, scheme: {{ ternary "HTTPS" "HTTP" $web.https }}}
{{- end }}
{{- end }}

{{- /* Not the agent's name: its DaemonSet, PodMonitor and NetworkPolicy select by that. */}}
{{- define "gpuwarden.fleet.selector" -}}
app.kubernetes.io/name: gpuwarden-fleet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpuwarden.fleet.labels" -}}
{{ include "gpuwarden.fleet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "gpuwarden.fleet.confined" -}}
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
