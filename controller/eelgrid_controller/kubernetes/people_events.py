"""Events for people (events.k8s.io/v1), as the API takes them.

Owns their shape and its limits: a note has at most 1,000 characters, a reason and an instance 128, a name 253. Must
not know who is told what, nor how an Event is sent.

Source: kubernetes `pkg/apis/core/validation/events.go`.
"""

from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.times import micro_time

__all__ = ["Regarding", "event_of"]

_NOTE_MOST = 1_000
_WORD_MOST = 128
_NAME_MOST = 200  # and the time behind it


class Regarding(NamedTuple):
    """The object that an Event is about; without a namespace for one of the whole cluster."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


def event_of(
    about: Regarding, text: str, *, is_warning: bool, reason: str, action: str, identity: str, now_ns: int
) -> dict[str, Any]:
    """The Event, to be created in its own `metadata.namespace`; `identity` is of this process."""
    regarding = {"apiVersion": about.api_version, "kind": about.kind, "name": about.name, "uid": about.uid}
    return {
        # Those of cluster-wide objects lie in `default`.
        "metadata": {"name": f"{about.name[:_NAME_MOST]}.{now_ns:x}", "namespace": about.namespace or "default"},
        "eventTime": micro_time(now_ns),
        "type": "Warning" if is_warning else "Normal",
        "reason": reason[:_WORD_MOST],
        "action": action,
        "note": text[:_NOTE_MOST],
        "reportingController": "eelgrid.io/controller",
        "reportingInstance": identity[:_WORD_MOST],
        "regarding": {**regarding, "namespace": about.namespace} if about.namespace else regarding,
    }
