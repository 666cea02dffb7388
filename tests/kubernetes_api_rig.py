"""A Kubernetes API for one test: the fake always, a real control plane where the environment says where one is.

    EELGRID_KUBECONFIG    a kubeconfig with all permissions, of a cluster that tests may fill
    KUBEBUILDER_ASSETS    a folder with etcd, kube-apiserver and, if there, kube-controller-manager

Each test has a namespace of its own; what it makes outside of it, it registers to be removed.
"""

import contextlib
import os
import secrets
from pathlib import Path

from eelgrid_controller.engines.kubernetes.api.client import ApiRequest, HttpClusterClient
from eelgrid_controller.engines.kubernetes.api.errors import ObjectAlreadyExists, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.kubeconfig import ClusterAccess, load_kubeconfig
from eelgrid_controller.engines.kubernetes.api.port import NAMESPACES, PODS, Resource
from tests.fakes.kubernetes.admission import gate_injector
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.control_plane import running_control_plane
from tests.fakes.kubernetes.resources import MUTATING_ADMISSION_POLICIES, MUTATING_ADMISSION_POLICY_BINDINGS

KUBECONFIG = os.environ.get("EELGRID_KUBECONFIG", "")
ASSETS = os.environ.get("KUBEBUILDER_ASSETS", "")
WAYS = ["fake", *(["real"] if KUBECONFIG or ASSETS else [])]
_RBAC = "rbac.authorization.k8s.io"
_SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_ROLES = Resource(_RBAC, "v1", "clusterroles", "ClusterRole", is_namespaced=False)
_ROLE_BINDINGS = Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", is_namespaced=False)


async def bind(cluster, name, *, namespace, node, uid=""):
    """Put a pod onto a node as kube-scheduler does."""
    metadata = {"name": name, "namespace": namespace} | ({"uid": uid} if uid else {})
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
    await cluster.exchange.call(ApiRequest("POST", PODS.path(namespace, name, "binding"), body=body))


class Rig:
    """One API, with a namespace in it that is the test's own."""

    def __init__(self, cluster, access, *, fake=None, has_controllers=False):
        self.cluster = cluster
        self.access = access
        self.fake = fake
        self.has_controllers = has_controllers  # whether Kubernetes' own controllers run
        self.space = f"t-{secrets.token_hex(4)}"
        self._made = []
        self._clients = []

    async def add(self, resource, body):
        """Create an object in the test's namespace; what has none is removed after the test."""
        body = {**body, "metadata": {**body["metadata"]}}
        if resource.is_namespaced:
            body["metadata"]["namespace"] = self.space
        made = await self.cluster.create(resource, body)
        if not resource.is_namespaced:
            self._made.append((resource, made["metadata"]["name"]))
        return made

    async def limited(self, rules):
        """The API as somebody sees it who may do only this."""
        name = f"t-{secrets.token_hex(4)}"
        if self.fake is not None:
            self.fake.access.grant(name, rules)
            return self.fake.client(name)
        await self.add(_SERVICE_ACCOUNTS, {"metadata": {"name": name}})
        await self.add(_ROLES, {"metadata": {"name": name}, "rules": rules})
        who = {"kind": "ServiceAccount", "name": name, "namespace": self.space}
        role = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": name}
        await self.add(_ROLE_BINDINGS, {"metadata": {"name": name}, "subjects": [who], "roleRef": role})
        path = _SERVICE_ACCOUNTS.path(self.space, name, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        told = await self.cluster.exchange.call(ApiRequest("POST", path, body=body))
        access = ClusterAccess(
            server=self.access.server, authority_pem=self.access.authority_pem, token=told["status"]["token"]
        )
        client = HttpClusterClient(access)
        self._clients.append(client)
        return client

    async def inject_gates(self, gate, label):
        """From now on new pods of this namespace with this label ("true") are gated at their creation."""
        if self.fake is not None:
            self.fake.api.mutators.append(gate_injector(label, "true", gate))
            return
        where = {"matchLabels": {"kubernetes.io/metadata.name": self.space}}
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        means = {
            "resourceRules": [rule],
            "namespaceSelector": where,
            "objectSelector": {"matchLabels": {label: "true"}},
        }
        does = f'Object{{spec: Object.spec{{schedulingGates: [Object.spec.schedulingGates{{name: "{gate}"}}]}}}}'
        mutation = {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": does}}
        spec = {
            "matchConstraints": means,
            "mutations": [mutation],
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
        }
        await self.add(MUTATING_ADMISSION_POLICIES, {"metadata": {"name": self.space}, "spec": spec})
        binding = {"metadata": {"name": self.space}, "spec": {"policyName": self.space}}
        await self.add(MUTATING_ADMISSION_POLICY_BINDINGS, binding)

    async def begin(self):
        await self.add(NAMESPACES, {"metadata": {"name": self.space}})
        if self.fake is None:
            # Where no controllers run nobody makes it, and no pod is admitted without.
            with contextlib.suppress(ObjectAlreadyExists):
                await self.add(_SERVICE_ACCOUNTS, {"metadata": {"name": "default"}})

    async def end(self):
        for resource, name in reversed(self._made):
            with contextlib.suppress(ObjectNotFound):
                await self.cluster.delete(resource, name)
        for client in self._clients:
            await client.close()


@contextlib.asynccontextmanager
async def open_rig(way):
    """A rig of this way, from its namespace to its end."""
    async with contextlib.AsyncExitStack() as stack:
        if way == "fake":
            fake = await stack.enter_async_context(FakeCluster())
            rig = Rig(fake.client(), fake.client_access(), fake=fake, has_controllers=True)
        else:
            kubeconfig = KUBECONFIG or running_control_plane(ASSETS)
            access = load_kubeconfig([Path(kubeconfig)])
            cluster = await stack.enter_async_context(HttpClusterClient(access))
            # Whether owners are followed tells whether the controllers run.
            rig = Rig(cluster, access, has_controllers=await _has_controllers(cluster))
        await rig.begin()
        try:
            yield rig
        finally:
            await rig.end()


_KNOWN = {}


async def _has_controllers(cluster):
    """Whether a controller manager gives each namespace its certificate authority."""
    if "controllers" not in _KNOWN:
        maps = Resource("", "v1", "configmaps", "ConfigMap")
        try:
            await cluster.get(maps, "kube-root-ca.crt", namespace="kube-system")
            _KNOWN["controllers"] = True
        except ObjectNotFound:
            _KNOWN["controllers"] = False
    return _KNOWN["controllers"]
