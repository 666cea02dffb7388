"""The claims that are ready on this node, kept over a restart of the agent.

Owns the file's format. Must not know how a device is made or unmade.

Theory. An entry is written before anything is changed for it, so that what was made for a claim
is known whatever happens in between, and is struck out after it is undone. What could not
be undone stays as left over, to be tried again. A file that is no journal is put aside and
nothing is guessed from it: what claims hold then is protected by its processes and by the leases in
the layouts' own journal, and nothing that stands is taken for ours to remove.

ClaimsUnkept         the journal cannot be read or written, so nothing may be changed
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from eelgrid_agent.durable_file import replace_file, set_aside

__all__ = ["ClaimJournal", "ClaimsUnkept", "GivenDevice", "Kept", "ReadyClaim"]

_SCHEMA = 1
_BYTES_MOST = 4 * 2**20


class ClaimsUnkept(Exception):
    """The journal cannot be read or written; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenDevice:
    """One device of a claim; `uuid` is empty until it stands, `is_made` where we made its instance."""

    request: str
    device: str
    uuid: str = ""
    is_made: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyClaim:
    """One claim, by what the kubelet calls it."""

    uid: str
    namespace: str
    name: str
    devices: tuple[GivenDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """All that is kept: claims by uid, and devices that we made and could not take away."""

    claims: Mapping[str, ReadyClaim]
    left: tuple[str, ...] = ()


class ClaimJournal:
    """A file of the state directory; without a path nothing outlives the process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._kept: Kept | None = None
        # Of a file that was put aside.
        self.problem = ""

    @property
    def kept(self) -> Kept:
        """What was stored last. Raises ClaimsUnkept."""
        if self._kept is None:
            self._kept = self._read()
        return self._kept

    def store(self, kept: Kept) -> None:
        """On return it survives a power cut. Raises ClaimsUnkept."""
        if self._path is not None and kept != self._kept:
            claims = [asdict(claim) for _, claim in sorted(kept.claims.items())]
            content = json.dumps({"schema": _SCHEMA, "claims": claims, "left": list(kept.left)}, indent=1)
            try:
                replace_file(self._path, content.encode())
            except OSError as error:
                raise ClaimsUnkept(f"{self._path}: {error.strerror}; make room and let the agent write it") from error
        self._kept = kept

    def _read(self) -> Kept:
        empty = Kept(claims={})
        if self._path is None:
            return empty
        try:
            with self._path.open("rb") as file:
                content = file.read(_BYTES_MOST + 1)
        except FileNotFoundError:
            return empty
        except OSError as error:
            raise ClaimsUnkept(f"{self._path}: {error.strerror}; let the agent read it") from error
        try:
            return _decoded(content)
        except (ValueError, KeyError, TypeError) as error:
            self.problem = (
                f"{self._path} is no journal of claims ({error}); it is kept as {self._put_aside(self._path)}"
            )
            return empty

    @staticmethod
    def _put_aside(path: Path) -> Path:
        try:
            return set_aside(path)
        except OSError as error:
            raise ClaimsUnkept(f"{path}: is no journal, and {error.strerror}; remove it") from error


def _decoded(content: bytes) -> Kept:
    if len(content) > _BYTES_MOST:
        raise ValueError(f"it has more than {_BYTES_MOST} bytes")
    found = json.loads(content)
    if found["schema"] != _SCHEMA:
        raise ValueError(f"schema {found['schema']}")
    claims = [
        ReadyClaim(**{**claim, "devices": tuple(GivenDevice(**one) for one in claim["devices"])})
        for claim in found["claims"]
    ]
    return Kept(claims={claim.uid: claim for claim in claims}, left=tuple(map(str, found["left"])))
