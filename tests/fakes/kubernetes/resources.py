"""Kinds that tests use and Eelgrid does not."""

from eelgrid_controller.engines.kubernetes.api.port import Resource

_ADMISSION = "admissionregistration.k8s.io"
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SERVICES = Resource("", "v1", "services", "Service")
DAEMON_SETS = Resource("apps", "v1", "daemonsets", "DaemonSet")
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", is_namespaced=False)
RESOURCE_CLAIM_TEMPLATES = Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate")
CUSTOM_RESOURCE_DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", is_namespaced=False
)
# v1 in 1.36, v1beta1 from 1.34, v1alpha1 from 1.32.
MUTATING_ADMISSION_POLICIES = Resource(
    _ADMISSION, "v1", "mutatingadmissionpolicies", "MutatingAdmissionPolicy", is_namespaced=False
)
MUTATING_ADMISSION_POLICY_BINDINGS = Resource(
    _ADMISSION, "v1", "mutatingadmissionpolicybindings", "MutatingAdmissionPolicyBinding", is_namespaced=False
)
MUTATING_WEBHOOK_CONFIGURATIONS = Resource(
    _ADMISSION, "v1", "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", is_namespaced=False
)
