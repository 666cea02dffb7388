"""CDI names of devices, and a specification for those that no other one names.

Owns the names and our one file. Must not know claims or layouts. Blocks on small files.

Theory. A container runtime finds a device by `nvidia.com/gpu=UUID` in the specifications of its
folders. NVIDIA's tools write these for what stood when they ran; an instance that was made a
second ago is in none of them. Ours names such devices and sets the variable that NVIDIA's
container runtime reads, which then mounts the rest; it takes no device that others name, since a
name in two files of one folder is an error to every runtime.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from eelgrid_agent.durable_file import replace_file

__all__ = ["KIND", "CdiFolder", "cdi_name"]

KIND = "nvidia.com/gpu"
FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
FILE = "eelgrid-gpu.json"
_VERSION = "0.5.0"
_BYTES_MOST = 4 * 2**20
# Readable for the runtime, which is another user's program in some clusters.
_MODE = 0o644


def cdi_name(uuid: str) -> str:
    """What a runtime is told."""
    return f"{KIND}={uuid}"


class CdiFolder:
    """Our file in one folder, beside those of others there and in `folders`."""

    def __init__(self, folder: Path, folders: Iterable[Path] = FOLDERS) -> None:
        self._path = folder / FILE
        self._folders = tuple(dict.fromkeys((folder, *folders)))

    def name(self, uuids: Iterable[str]) -> None:
        """From now on our file names these, as far as no other does. Raises OSError."""
        named = self._named()
        devices = [
            {"name": uuid, "containerEdits": {"env": [f"NVIDIA_VISIBLE_DEVICES={uuid}"]}}
            for uuid in sorted(set(uuids) - named)
        ]
        if not devices:
            self._path.unlink(missing_ok=True)
            return
        content = json.dumps({"cdiVersion": _VERSION, "kind": KIND, "devices": devices}, indent=1).encode()
        if not self._path.exists() or self._path.read_bytes() != content:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, content)
            self._path.chmod(_MODE)

    def _named(self) -> set[str]:
        found: set[str] = set()
        for folder in self._folders:
            for path in sorted(folder.glob("*")) if folder.is_dir() else ():
                if path.suffix in (".json", ".yaml", ".yml") and path != self._path:
                    found |= _names(path)
        return found


def _names(path: Path) -> set[str]:
    """The devices of our kind in a specification; none where it is none."""
    try:
        with path.open("rb") as file:
            text = file.read(_BYTES_MOST)
        document: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if document["kind"] != KIND:
            return set()
        return {str(one["name"]) for one in document["devices"]}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return set()
