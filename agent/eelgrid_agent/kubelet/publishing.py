"""The node's ResourceSlices kept at the API server as they are wanted.

Owns the writing: which objects are made, replaced and taken away, and the generation. Must not
know what is in them. Every method blocks.

Theory. All slices of a pool carry one generation, and a reader takes only the highest one when
it is complete; so a change of any of them rewrites all under the next number, and a change cut off in
the middle leaves no half-new pool to be used. Whatever is at the server is looked at each time:
a kubelet that starts anew takes away the slices of drivers that are late, and others may, too. An
object that another writer changed in between is looked at again.
"""

from collections.abc import Callable, Sequence
from typing import Any

from eelgrid_agent.kubelet.api_server import Absent, ApiServer, Conflicting, Denied
from eelgrid_agent.kubelet.slices import DRIVER

__all__ = ["SLICES_PATH", "Publisher"]

SLICES_PATH = "/apis/resource.k8s.io/v1/resourceslices"
_ROUNDS = 3
_SLICES_MOST = "500"
# What the API server adds by itself.
_ADDED = ("timeAdded",)

# The objects of a generation, for the node of this uid.
Draw = Callable[[int, str], Sequence[dict[str, Any]]]


class Publisher:
    """The slices of one node."""

    def __init__(self, api: ApiServer, node_name: str) -> None:
        self._api = api
        self._node_name = node_name
        self._owner_uid: str | None = None
        self.writes_total = 0

    def publish(self, draw: Draw) -> int:
        """Brings the server to what `draw` says; how many objects were written. Raises ApiError."""
        for attempt in range(_ROUNDS):
            try:
                written = self._published(draw)
            except (Conflicting, Absent):
                if attempt + 1 == _ROUNDS:
                    raise
            else:
                self.writes_total += written
                return written
        raise AssertionError("the last round returns or raises")

    def withdraw(self) -> int:
        """Takes all slices of this node away; how many there were. Raises ApiError."""
        return self.publish(lambda _, __: ())

    def _published(self, draw: Draw) -> int:
        standing = {str(one["metadata"]["name"]): one for one in self._listed()}
        generation = max((int(one["spec"]["pool"]["generation"]) for one in standing.values()), default=0)
        owner = self._owner()
        wanted = {one["metadata"]["name"]: one for one in draw(max(1, generation), owner)}
        if wanted.keys() == standing.keys() and all(_is_like(standing[name], one) for name, one in wanted.items()):
            return 0
        if standing:
            wanted = {one["metadata"]["name"]: one for one in draw(generation + 1, owner)}
        for name, one in wanted.items():
            if name in standing:
                version = standing[name]["metadata"]["resourceVersion"]
                metadata = {**one["metadata"], "resourceVersion": version}
                self._api.replace(f"{SLICES_PATH}/{name}", {**one, "metadata": metadata})
            else:
                self._api.create(SLICES_PATH, one)
        surplus = standing.keys() - wanted.keys()
        for name in sorted(surplus):
            self._api.delete(f"{SLICES_PATH}/{name}")
        return len(wanted) + len(surplus)

    def _listed(self) -> list[dict[str, Any]]:
        selector = f"spec.driver={DRIVER},spec.nodeName={self._node_name}"
        found = self._api.get(SLICES_PATH, fieldSelector=selector, limit=_SLICES_MOST)
        return list(found.get("items", ()))

    def _owner(self) -> str:
        """The node's uid; empty where we may not read it: then slices outlive a node that is deleted."""
        if self._owner_uid is None:
            try:
                node = self._api.get(f"/api/v1/nodes/{self._node_name}")
            except Denied:
                self._owner_uid = ""
            else:
                self._owner_uid = str(node["metadata"]["uid"])
        return self._owner_uid


def _is_like(standing: dict[str, Any], wanted: dict[str, Any]) -> bool:
    owners = [one.get("uid") for one in standing["metadata"].get("ownerReferences", ())]
    asked = [one["uid"] for one in wanted["metadata"].get("ownerReferences", ())]
    return owners == asked and bool(_bare(standing["spec"]) == _bare(wanted["spec"]))


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items() if key not in _ADDED}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return value
