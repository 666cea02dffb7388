{{- define "eelgrid.name" -}}
{{- default "eelgrid" .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "eelgrid.labels" -}}
app.kubernetes.io/name: {{ include "eelgrid.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "eelgrid.selector" -}}
app.kubernetes.io/name: {{ include "eelgrid.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "eelgrid.controllerAccount" -}}
{{- default (printf "%s-controller" (include "eelgrid.name" .)) .Values.serviceAccount.controllerName -}}
{{- end }}

{{- define "eelgrid.agentAccount" -}}
{{- default (printf "%s-agent" (include "eelgrid.name" .)) .Values.serviceAccount.agentName -}}
{{- end }}

{{- /* Takes (list CONTEXT PROGRAM). */ -}}
{{- define "eelgrid.image" -}}
{{- $top := index . 0 -}}
{{- with $top.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- index . 1 }}:{{ default $top.Chart.AppVersion $top.Values.image.tag -}}
{{- end }}

{{- define "eelgrid.replicas" -}}
{{- if .Values.controller.kubernetes.enabled }}{{ .Values.controller.replicas }}{{ else }}1{{ end -}}
{{- end }}

{{- /* v1, v1beta1 or nothing: where no controller takes gates off, none are put on. */ -}}
{{- define "eelgrid.policyVersion" -}}
{{- $asked := .Values.gate.policyVersion -}}
{{- if or (not .Values.gate.enabled) (not .Values.controller.kubernetes.enabled) (eq $asked "none") -}}
{{- else if ne $asked "auto" -}}{{ $asked }}
{{- else if or (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) -}}v1
{{- else if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" -}}v1beta1
{{- end -}}
{{- end }}

{{- /* Values that cannot go together, told before anything is applied. */ -}}
{{- define "eelgrid.check" -}}
{{- $c := .Values.controller -}}
{{- if and (eq $c.journal.kind "claim") (gt (int (include "eelgrid.replicas" .)) 1) -}}
{{- fail "controller.journal.kind=claim goes with controller.replicas=1: the journal has one writer. Say emptyDir to have a standby" -}}
{{- end -}}
{{- if and $c.journal.existingClaim (ne $c.journal.kind "claim") -}}
{{- fail "controller.journal.existingClaim needs controller.journal.kind=claim" -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .Values.agent.pools -}}
{{- if hasKey $seen .name -}}{{ fail (printf "agent.pools: %s is there twice" .name) }}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- end }}
