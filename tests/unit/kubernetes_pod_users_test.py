"""Whose pods are, from the changes that an informer tells: annotation before label, and known after the pod is gone."""

from eelgrid_controller.engines.kubernetes.api.object_store import Delta, DeltaType
from eelgrid_controller.engines.kubernetes.api.port import ObjectKey
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import PodUsers, prune_pod


def pod(name, *, annotation=None, label=None):
    """As the informer keeps it."""
    metadata = {"name": name, "namespace": "ml", "uid": name}
    for kind, user in (("annotations", annotation), ("labels", label)):
        metadata[kind] = {"app": "x"} | ({} if user is None else {"eelgrid.io/user": user})
    return prune_pod({"metadata": metadata})


def told(users, found, *, gone=False):
    key = ObjectKey("ml", found["metadata"]["name"])
    users.heard([Delta(DeltaType.DELETED, key, found, None) if gone else Delta(DeltaType.ADDED, key, None, found)])
    return users.of(*key)


def test_a_pod_says_whose_it_is():
    users = PodUsers()
    assert told(users, pod("a", annotation="ann@example.org", label="bob")) == "ann@example.org"
    assert told(users, pod("b", label="bob")) == "bob"
    assert told(users, pod("c")) == ""
    assert users.user_of("web", "a") == ""
    assert told(users, pod("b", label="eve")) == "eve"
    assert told(users, pod("b")) == ""


def test_a_pod_that_is_gone_is_known_until_others_need_the_room():
    users = PodUsers(most=2)
    told(users, pod("a", label="ann"))
    assert told(users, pod("a", label="ann"), gone=True) == "ann"
    told(users, pod("b", label="bob"))
    told(users, pod("c", label="carl"))
    assert [users.user_of("ml", name) for name in "abc"] == ["", "bob", "carl"]


def test_what_is_no_name_is_nobody():
    users = PodUsers()
    for odd in ("x" * 254, "a\nb", "\x1b[0m", ""):
        assert told(users, pod("a", annotation=odd)) == ""
