{{- /* Namespaces where nothing is gated, as JSON. */ -}}
{{- define "eelgrid.excluded" -}}
{{- concat .Values.gate.excludedNamespaces (list .Release.Namespace) | uniq | toJson -}}
{{- end }}

{{- /* Which pods are meant, in CEL: the same for the policy and the webhook. */ -}}
{{- define "eelgrid.gateConditions" -}}
# Somebody chose the node already: static and mirror pods, DaemonSets of old, pods of other schedulers' binders.
- name: has-no-node
  expression: "!has(object.spec.nodeName) || object.spec.nodeName == ''"
# A DaemonSet's pod belongs to its node, a mirror pod to its kubelet.
- name: is-not-bound-by-its-owner
  expression: >-
    !has(object.metadata.ownerReferences)
    || !object.metadata.ownerReferences.exists(owner, owner.kind == 'DaemonSet' || owner.kind == 'Node')
- name: is-no-mirror
  expression: >-
    !has(object.metadata.annotations)
    || !('kubernetes.io/config.mirror' in object.metadata.annotations
    || 'kubernetes.io/config.source' in object.metadata.annotations)
# A pod with the label always; in a namespace with the label only pods that ask for devices.
- name: is-asked-for
  expression: >-
    (has(object.metadata.labels) && 'eelgrid.io/managed' in object.metadata.labels
    && object.metadata.labels['eelgrid.io/managed'] == 'true')
    || (has(object.spec.resourceClaims) && object.spec.resourceClaims.size() > 0)
    || object.spec.containers.exists(c, has(c.resources) && has(c.resources.limits)
    && c.resources.limits.exists(name, {{ range $i, $prefix := .Values.gate.resourcePrefixes }}{{ if $i }} || {{ end }}name.startsWith('{{ $prefix }}'){{ end }}))
    || (has(object.spec.initContainers) && object.spec.initContainers.exists(c, has(c.resources) && has(c.resources.limits)
    && c.resources.limits.exists(name, {{ range $i, $prefix := .Values.gate.resourcePrefixes }}{{ if $i }} || {{ end }}name.startsWith('{{ $prefix }}'){{ end }})))
{{- end }}

{{- /* Pods with the label, in any namespace but the excluded. */ -}}
{{- define "eelgrid.gatePods" -}}
objectSelector:
  matchLabels: {eelgrid.io/managed: "true"}
namespaceSelector:
  matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: NotIn, values: {{ include "eelgrid.excluded" . }}}
{{- end }}

{{- /* Namespaces with the label, without the pods that decide for themselves. */ -}}
{{- define "eelgrid.gateNamespaces" -}}
objectSelector:
  matchExpressions:
    - {key: eelgrid.io/managed, operator: NotIn, values: ["true", "false"]}
namespaceSelector:
  matchLabels: {eelgrid.io/managed: "true"}
  matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: NotIn, values: {{ include "eelgrid.excluded" . }}}
{{- end }}
