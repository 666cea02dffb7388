"""What a container id is called: namespace, pod and container, from the kubelet's links to container logs.

Owns how /var/log/containers is read. Must not know processes or devices; the
folder and the time are arguments.

Theory. PodResources names pods and knows no UID; a cgroup holds the UID and
the container's id and knows no name. The kubelet joins the two on the node
itself: for every container it keeps a link <pod>_<namespace>_<container>-<id>.log,
whatever the runtime and without a word to the API server. Names of links are
enough; no log is opened. Where the folder is not mounted, nothing is named
here and the join is left to whoever knows better.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PodName", "PodNames", "parse_log_name"]

# A node runs some hundreds of containers and keeps a few dead ones of each.
ENTRIES_MOST = 16_384
# An unknown container makes us look again, and not more often than this.
REFRESH_S = 5.0

# Neither a namespace nor a pod can hold an underscore.
_LOG_NAME = re.compile(r"^([a-z0-9.-]+)_([a-z0-9-]+)_([a-z0-9-]+)-([0-9a-f]{64})\.log$")


@dataclass(frozen=True, slots=True)
class PodName:
    """What a container is called."""

    namespace: str
    pod: str
    container: str


def parse_log_name(name: str) -> tuple[str, PodName] | None:
    """The container id and its name in the name of a link; None for any other file."""
    found = _LOG_NAME.match(name)
    if found is None:
        return None
    return found[4], PodName(namespace=found[2], pod=found[1], container=found[3])


class PodNames:
    """Names by container id."""

    def __init__(self, folder: Path = Path("/var/log/containers")) -> None:
        self._folder = folder
        self._names: dict[str, PodName] = {}
        self._read_ns: int | None = None

    def find(self, container_id: str, now_ns: int) -> PodName | None:
        """The container's name, looked for again where it is new."""
        if container_id not in self._names and (self._read_ns is None or now_ns - self._read_ns > REFRESH_S * 1e9):
            self._read_ns = now_ns
            self._names = self._listing()
        return self._names.get(container_id)

    def _listing(self) -> dict[str, PodName]:
        names: dict[str, PodName] = {}
        try:
            with os.scandir(self._folder) as entries:
                for count, entry in enumerate(entries):
                    if count == ENTRIES_MOST:
                        break
                    parsed = parse_log_name(entry.name)
                    if parsed is not None:
                        names[parsed[0]] = parsed[1]
        except OSError:
            # Not a node of Kubernetes, or not mounted; the names we had are as good as any.
            return self._names
        return names
