"""Local users: how a caller on a Unix socket proves which user of this machine it is.

Owns the folder of proofs beside the socket, their form, and the check. Must not know what a user may do.

Theory. gRPC for Python does not show the peer's credentials of a Unix socket. So a caller proves its user as HTCondor's
FS method does: by a file. The owner of a file is what the kernel says, and nobody but root can give one away. Beside
the socket `PATH` is the folder `PATH.users`, of the server's user, where everybody may make files and remove their own,
and nobody may list others' (mode 1733). A client makes a file there that only it may read (mode 0600), with a secret,
and sends name and secret with each call. Who knows the secret can read the file, so it is its owner, or root. A hard
link to somebody's file elsewhere is refused, and so is a symbolic link.

Both travel over the socket alone; the file is made once and used by every client of the user.
"""

import contextlib
import os
import pwd
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

PROOF_KEY = "eelgrid-local-user"
_SUFFIX = ".users"
_FOLDER_MODE = 0o1733
_SECRET_BYTES = 32
_SECRET_LETTERS = 2 * _SECRET_BYTES
_NAME_MOST = 64
# Another process of the same user writes it at this moment.
_WRITTEN_WITHIN_S = 1.0
_LOOK_AGAIN_S = 0.005


class LocalUser(NamedTuple):
    """A user of this machine."""

    uid: int
    name: str


def find_proofs_folder(address: str) -> Path | None:
    """Returns the folder of proofs of a Unix socket's address if its server asks for them, None otherwise."""
    if not address.startswith("unix:"):
        return None
    folder = _folder_of(address)
    return folder if folder.is_dir() else None


def create_proofs_folder(address: str) -> Path:
    """Makes the folder of proofs beside a socket; raises OSError where it, or another's in its place, cannot be used."""
    folder = _folder_of(address)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(13, "belongs to somebody else", str(folder))
    folder.chmod(_FOLDER_MODE)
    return folder


def _folder_of(address: str) -> Path:
    path = address.removeprefix("unix:")
    return Path((path.removeprefix("//") if path.startswith("///") else path) + _SUFFIX)


def read_proof(folder: Path) -> str:
    """Returns this user's proof, and makes it if there is none; raises OSError."""
    # Another's file under our number is no proof of ours, and does not keep us from making one.
    for name in (str(os.geteuid()), f"{os.geteuid()}.{os.urandom(8).hex()}"):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            return f"{name}:{_read_secret(folder / name)}"
    raise PermissionError(13, "cannot make a proof of the local user", str(folder))


def _read_secret(path: Path) -> str:
    """Returns the secret of a file of ours; raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    else:
        try:
            os.write(descriptor, os.urandom(_SECRET_BYTES).hex().encode())
        finally:
            os.close(descriptor)
    deadline_s = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        found = _read_file(path)
        if found is None or found[0] != os.geteuid():
            raise PermissionError(13, "is no file of ours", str(path))
        if len(found[1]) == _SECRET_LETTERS:
            return found[1]
        if time.monotonic() > deadline_s:
            # Its writer was killed: the next call makes it.
            path.unlink()
            raise PermissionError(13, "is not whole", str(path))
        time.sleep(_LOOK_AGAIN_S)


def _read_file(path: Path) -> tuple[int, str] | None:
    """Returns owner and content of a file that its owner alone may read; None of any other. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077 or found.st_nlink != 1:
            return None
        return found.st_uid, os.read(descriptor, _SECRET_LETTERS + 1).decode("latin-1")
    finally:
        os.close(descriptor)


def verify_proof(folder: Path, proof: str) -> LocalUser | None:
    """Returns whose proof it is; None if it proves nothing."""
    from hmac import compare_digest

    name, _, secret = proof.partition(":")
    if len(name) > _NAME_MOST or not name.replace(".", "").isalnum() or not name.isascii():
        return None
    try:
        found = _read_file(folder / name)
    except OSError:
        return None
    if found is None or len(found[1]) != _SECRET_LETTERS or not compare_digest(found[1].encode(), secret.encode()):
        return None
    try:
        return LocalUser(found[0], pwd.getpwuid(found[0]).pw_name)
    except KeyError:
        # A user without a name: it has none by which to own work.
        return None


class _ProofPlugin(grpc.AuthMetadataPlugin):
    """Sends a proof with each call."""

    def __init__(self, proof: str) -> None:
        self._metadata = ((PROOF_KEY, proof),)

    def __call__(self, context: grpc.AuthMetadataContext, callback: Callable[[Any, Any], None]) -> None:  # noqa: ARG002
        callback(self._metadata, None)


def build_channel_credentials(folder: Path, proof: str | None = None) -> grpc.ChannelCredentials:
    """Returns the credentials of a channel over a Unix socket, with a proof or that of this user; raises OSError."""
    return grpc.composite_channel_credentials(
        grpc.local_channel_credentials(grpc.LocalConnectionType.UDS),
        grpc.metadata_call_credentials(_ProofPlugin(proof or read_proof(folder)), "local-user"),
    )


def build_server_credentials() -> grpc.ServerCredentials:
    """Returns the credentials of a server on a Unix socket, to which no other connection is made."""
    credentials: grpc.ServerCredentials = grpc.local_server_credentials(grpc.LocalConnectionType.UDS)
    return credentials
