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

{{- /* Where agents connect. */ -}}
{{- define "eelgrid.agentsAddress" -}}
{{- include "eelgrid.name" . }}-{{ ternary "ingest" "controller" .Values.ingest.enabled }}.{{ .Release.Namespace }}.svc:{{ ternary "7444" "7443" .Values.ingest.enabled }}
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

{{- /* Who gates: v1 or v1beta1 of the policy, webhook, or nothing. Where no controller takes gates off, none are put on. */ -}}
{{- define "eelgrid.policyVersion" -}}
{{- $asked := .Values.gate.policyVersion -}}
{{- if or (not .Values.gate.enabled) (not .Values.controller.kubernetes.enabled) (eq $asked "none") -}}
{{- else if ne $asked "auto" -}}{{ $asked }}
{{- else if eq .Values.controller.kubernetes.mode "scheduler" -}}webhook
{{- else if or (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) -}}v1
{{- else if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" -}}v1beta1
{{- else if or (ne .Values.tls.mode "secret") .Values.gate.webhook.caBundle -}}webhook
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
{{- if and (eq $c.kubernetes.mode "scheduler") (has .Values.gate.policyVersion (list "v1" "v1beta1")) -}}
{{- fail "controller.kubernetes.mode=scheduler needs the webhook, which alone can tell which pods it may bind; set gate.policyVersion to auto, webhook or none" -}}
{{- end -}}
{{- if and $c.kubernetes.pinAtAdmission (or (ne $c.kubernetes.mode "scheduler") (ne (include "eelgrid.policyVersion" .) "webhook")) -}}
{{- fail "controller.kubernetes.pinAtAdmission needs controller.kubernetes.mode=scheduler and gate.policyVersion=auto or webhook: the webhook answers with the node" -}}
{{- end -}}
{{- if eq (include "eelgrid.policyVersion" .) "webhook" -}}
{{- if eq .Values.gate.failurePolicy "Fail" -}}
{{- fail "gate.failurePolicy=Fail goes with the policy: a webhook that is away would refuse pods; say Ignore" -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "secret") (not .Values.gate.webhook.caBundle) -}}
{{- fail "gate.policyVersion=webhook with tls.mode=secret needs gate.webhook.caBundle: the authority, in PEM, of the certificate in tls.webhookSecret" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.front.enabled (not .Values.front.clusters) -}}
{{- fail "front.enabled needs front.clusters: by name, the address of each cluster's controller" -}}
{{- end -}}
{{- range $cluster, $_ := .Values.front.page.links -}}
{{- if not (hasKey $.Values.front.clusters $cluster) -}}{{ fail (printf "front.page.links: %s is none of front.clusters" $cluster) }}{{- end -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .Values.agent.pools -}}
{{- if hasKey $seen .name -}}{{ fail (printf "agent.pools: %s is there twice" .name) }}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- if and .dra .devicePlugin (ne (toString .devicePlugin) "off") -}}
{{- fail (printf "agent.pools: %s has dra and devicePlugin: one device would be given away twice" .name) -}}
{{- end -}}
{{- if and .dra (semverCompare "<1.36.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "agent.pools: %s has dra, which needs Kubernetes 1.36; this is %s" .name $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and .dra (not (has "claims" $c.kubernetes.abilities)) -}}
{{- fail (printf "agent.pools: %s has dra, but nobody would allocate its claims: add claims to controller.kubernetes.abilities" .name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The names of the pools whose agents are DRA drivers, as JSON. */ -}}
{{- define "eelgrid.draPools" -}}
{{- $found := list -}}
{{- if .Values.agent.enabled -}}
{{- range .Values.agent.pools }}{{ if .dra }}{{ $found = append $found .name }}{{ end }}{{ end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* Who has which role, for the controller and for the agents' own API. */}}
{{- define "eelgrid.roleArguments" -}}
{{- $made := has .Values.tls.mode (list "generated" "certManager") -}}
- --roles={{ default (ternary "require" "permit" $made) .Values.tls.roles }}
{{- if $made }}
# By name, too: helm cannot write organizations, and an issuer may leave them out.
- --grant=agent=DNS:{{ include "eelgrid.name" . }}-agent
- --grant=admin=DNS:{{ include "eelgrid.name" . }}-operator
- --grant=viewer=DNS:{{ include "eelgrid.name" . }}-viewer
{{- if .Values.ingest.enabled }}
- --grant=ingest=DNS:{{ include "eelgrid.name" . }}-ingest
{{- end }}
{{- end }}
{{- range .Values.tls.grants }}
- {{ printf "--grant=%s" . | quote }}
{{- end }}
{{- end }}
