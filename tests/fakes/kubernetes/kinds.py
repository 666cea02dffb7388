"""Which kinds the fake serves, in which versions, and what discovery tells about them."""

from dataclasses import dataclass, field

from eelgrid_controller.engines.kubernetes.api import port
from tests.fakes.kubernetes import resources

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True)
class Kind:
    """A kind and how its objects are treated."""

    group: str
    versions: tuple  # the first is stored and preferred
    plural: str
    kind: str
    is_namespaced: bool = True
    has_status: bool = True
    has_generation: bool = True
    is_custom: bool = False
    needs_version: bool = False  # a PUT without a resource version is refused
    parts: tuple = ()  # subresources beside status
    key: tuple = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "key", (self.group, self.plural))

    @property
    def title(self):
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def api_version(self, version):
        return f"{self.group}/{version}" if self.group else version


def of(resource, *, versions=(), **how):
    """The kind of a `Resource`."""
    return Kind(
        resource.group, versions or (resource.version,), resource.plural, resource.kind, resource.is_namespaced, **how
    )


_NO_STATUS = {"has_status": False, "has_generation": False}
BUILT_IN = (
    of(port.PODS, parts=("binding", "eviction", "resize")),
    of(port.NODES, has_generation=False),
    of(port.NAMESPACES, has_generation=False),
    of(resources.CONFIG_MAPS, **_NO_STATUS),
    of(port.PERSISTENT_VOLUME_CLAIMS, has_generation=False),
    of(port.PERSISTENT_VOLUMES, has_generation=False),
    of(port.STORAGE_CLASSES, **_NO_STATUS),
    of(resources.SERVICES, has_generation=False),
    of(port.EVENTS, **_NO_STATUS),
    of(port.LEASES, **_NO_STATUS, needs_version=True),
    of(port.DEPLOYMENTS, parts=("scale",)),
    of(port.REPLICA_SETS, parts=("scale",)),
    of(port.STATEFUL_SETS, parts=("scale",)),
    of(resources.DAEMON_SETS),
    of(port.JOBS),
    of(port.HORIZONTAL_POD_AUTOSCALERS),
    of(port.POD_DISRUPTION_BUDGETS),
    of(resources.PRIORITY_CLASSES, has_status=False),
    of(port.RESOURCE_CLAIMS, has_generation=False),
    of(resources.RESOURCE_CLAIM_TEMPLATES, **_NO_STATUS),
    of(port.RESOURCE_SLICES, has_status=False),
    of(port.DEVICE_CLASSES, has_status=False),
    of(resources.MUTATING_ADMISSION_POLICIES, has_status=False, versions=("v1", "v1beta1")),
    of(resources.MUTATING_ADMISSION_POLICY_BINDINGS, has_status=False, versions=("v1", "v1beta1")),
    of(resources.MUTATING_WEBHOOK_CONFIGURATIONS, has_status=False),
    of(resources.CUSTOM_RESOURCE_DEFINITIONS, is_custom=False),
)
# Served only where somebody turned it on.
OPTIONAL = {"podgroups": of(port.POD_GROUPS)}


def custom(definition):
    """The kind that a CustomResourceDefinition defines."""
    spec = definition["spec"]
    versions = [one for one in spec["versions"] if one.get("served", True)]
    return Kind(
        spec["group"],
        tuple(one["name"] for one in versions),
        spec["names"]["plural"],
        spec["names"]["kind"],
        spec.get("scope", "Namespaced") == "Namespaced",
        has_status=any("status" in (one.get("subresources") or {}) for one in versions),
        is_custom=True,
        needs_version=True,
    )


class Catalogue:
    """The kinds that are served now."""

    def __init__(self, minor):
        self.minor = minor
        self.kinds = {}
        self.groups_away = set()  # whose own server does not answer
        for kind in BUILT_IN:
            self.serve(kind)

    def serve(self, kind):
        for version in kind.versions:
            self.kinds[kind.group, version, kind.plural] = kind

    def withdraw(self, kind):
        for version in kind.versions:
            self.kinds.pop((kind.group, version, kind.plural), None)

    def find(self, group, version, plural):
        return self.kinds.get((group, version, plural))

    def named(self, api_version, kind):
        """The kind of an object's own words."""
        group, _, version = api_version.rpartition("/")
        return next(
            (one for (of, at, _), one in self.kinds.items() if of == group and at == version and one.kind == kind), None
        )

    def version(self):
        git = f"v1.{self.minor}.2"
        return {"major": "1", "minor": str(self.minor), "gitVersion": git, "platform": "linux/amd64"}

    def aggregated(self, is_core):
        """What /api and /apis tell to those that accept aggregated discovery."""
        groups = {}
        for (group, version, plural), kind in self.kinds.items():
            if (group == "") is is_core and group not in self.groups_away:
                groups.setdefault(group, {}).setdefault(version, []).append(self._told(version, plural, kind))
        items = [
            {
                "metadata": {"name": group} if group else {"creationTimestamp": None},
                "versions": [
                    {"version": version, "resources": found, "freshness": "Current"}
                    for version, found in versions.items()
                ],
            }
            for group, versions in groups.items()
        ]
        return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}

    @staticmethod
    def _told(version, plural, kind):
        parts = [*(["status"] if kind.has_status else []), *kind.parts]
        return {
            "resource": plural,
            "responseKind": {"group": kind.group, "version": version, "kind": kind.kind},
            "scope": "Namespaced" if kind.is_namespaced else "Cluster",
            "singularResource": kind.kind.lower(),
            "verbs": VERBS,
            "subresources": [{"subresource": part, "verbs": ["get", "patch", "update"]} for part in parts],
        }

    def plain(self, path):
        """What discovery tells the old way, at a path; None where nothing is."""
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = {}
            for group, version, _ in self.kinds:
                if group and version not in groups.setdefault(group, []):
                    groups[group].append(version)
            told = [
                {"name": group, "versions": [{"groupVersion": f"{group}/{one}", "version": one} for one in versions]}
                for group, versions in groups.items()
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": told}
        *_, group, version = ("", *path.removeprefix("/apis/").removeprefix("/api/").split("/"))
        found = []
        for (of_group, at, plural), kind in self.kinds.items():
            if (of_group, at) == (group, version):
                parts = ("", *(["/status"] if kind.has_status else []), *(f"/{part}" for part in kind.parts))
                found += [
                    {"name": plural + part, "namespaced": kind.is_namespaced, "kind": kind.kind} for part in parts
                ]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": found} if found else None
