"""The lease socket: how an engine beside the agent asks for devices, and gives them back.

Owns the protocol, its server and its client. Must not know what is refused, nor who still lives.

`eelgrid-agent lease` is the client, made for a prolog and an epilog of Slurm, and for whoever starts a Ray cluster. One
request and one answer a connection, each a line of JSON, on a UNIX socket that only root and the agent's own user may use:

    {"op": "take", "engine": "slurm", "owner": "12", "gpus": ["GPU-...", "MIG-...", "0"], "shared": false, "pid": 0}
    {"op": "release", "engine": "slurm", "owner": "12", "gpus": null}
    {"op": "list"}

    {"ok": true, "leases": [...], "released": 0}
    {"ok": false, "refused": true, "problem": "GPU ... is leased to local w-1/0/1 since ..., wait ..."}
    {"ok": false, "failed": true, "problem": "this node has no GPU or slice 9; ..."}

A GPU is named by the UUID of a GPU or of a MIG slice, or by an index of the driver. `take` gives all or none. Both may be
repeated: whoever got no answer asks again. A lease is the owner's until it is released, or until its end is proven
(lease_owners.py); `pid` names a process with which it ends.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.lease_table import (
    KUBERNETES_ENGINE,
    LOCAL_ENGINE,
    NAME_MOST,
    LeaseEntry,
    LeaseHolder,
    LeaseRefused,
)
from eelgrid_agent.node.lease_owners import read_start_ticks

_LOG = logging.getLogger("eelgrid.agent")
LINE_BYTES_MOST = 64 * 1024
_READ_S = 5.0
_CONNECTIONS_MOST = 64
_GPUS_MOST = 128
# Of the path of a UNIX socket; the kernel takes no longer one.
_SOCKET_BYTES_MOST = 107
_AGAIN_S = 0.2


class LeaseSocketError(Exception):
    """The agent cannot be asked, or the socket not be served; the message says what to do."""


class LeaseRequestError(ValueError):
    """The request is none; the message names the field."""


def handle_request(leases: DeviceLeases, request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request; raises LeaseRequestError, and LeaseRefused where a device is not given."""
    operation = request.get("op")
    if operation == "list":
        return {"ok": True, "leases": [describe_lease(one, leases) for one in leases.table.leases]} | _faults(leases)
    if operation not in {"take", "release"}:
        raise LeaseRequestError(f"op: {operation!r} is none; use take, release or list")
    holder, names = _parse_holder(request, is_taken=operation == "take"), _parse_names(request)
    if operation == "release":
        return {"ok": True, "leases": [], "released": leases.release(holder, names)}
    if not names:
        raise LeaseRequestError("gpus: is empty; name one GPU at least")
    pid = request.get("pid", 0)
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 <= pid < 2**31:
        raise LeaseRequestError(f"pid: {pid!r} is no process id")
    ticks = read_start_ticks(pid) if pid else 0
    if pid and not ticks:
        raise LeaseRequestError(f"pid: there is no process {pid}")
    is_shared = request.get("shared", False) is True
    taken = leases.take(holder, names, is_shared=is_shared, process=(pid, ticks))
    return {"ok": True, "leases": [describe_lease(one, leases) for one in taken]}


def _faults(leases: DeviceLeases) -> dict[str, Any]:
    return {"disputes": sorted(set(leases.disputes.values())), "problem": leases.problem}


def describe_lease(lease: LeaseEntry, leases: DeviceLeases) -> dict[str, Any]:
    """Returns a lease as others read it; `unknown` says why it is not known whether its owner still exists."""
    return {
        "gpu_uuid": lease.device.gpu_uuid,
        "device_uuid": lease.device.uuid,
        "start": lease.device.start,
        "size": lease.device.size,
        "engine": lease.holder.engine,
        "owner": lease.holder.owner,
        "note": lease.note,
        "since_ns": lease.since_ns,
        "shared": lease.is_shared,
        "unknown": leases.unverified.get(lease.serial, ""),
    }


def _parse_holder(request: Mapping[str, Any], *, is_taken: bool) -> LeaseHolder:
    found = []
    for field in ("engine", "owner"):
        text = request.get(field)
        if not isinstance(text, str) or not 0 < len(text) <= NAME_MOST or not text.isprintable():
            raise LeaseRequestError(f"{field}: {text!r} is no name of 1 to {NAME_MOST} printable characters")
        found.append(text)
    if found[0] == LOCAL_ENGINE or (is_taken and found[0] == KUBERNETES_ENGINE):
        # The kubelet's may be given back by hand, on a node that it has left for good.
        raise LeaseRequestError(f"engine: {found[0]} is the agent's own; name the engine that asks, such as slurm")
    return LeaseHolder(*found)


def _parse_names(request: Mapping[str, Any]) -> list[str] | None:
    names = request.get("gpus")
    if names is None and request["op"] == "release":
        return None
    if not isinstance(names, list) or len(names) > _GPUS_MOST:
        raise LeaseRequestError(f"gpus: has to be a list of at most {_GPUS_MOST} names")
    for name in names:
        if not isinstance(name, str) or len(name) > NAME_MOST:
            raise LeaseRequestError(f"gpus: {name!r} is no name")
    return names


class LeaseSocket:
    """Serves the leases of one node."""

    def __init__(self, path: Path, leases: DeviceLeases) -> None:
        """Raises LeaseSocketError for a path that is too long."""
        if len(str(path).encode()) > _SOCKET_BYTES_MOST:
            raise LeaseSocketError(
                f"--lease-socket {path}: has more than {_SOCKET_BYTES_MOST} bytes; choose a shorter one"
            )
        self._path, self._leases = path, leases
        self._connections = 0

    async def run(self, *, is_required: bool = True) -> None:
        """Serves until cancelled; raises LeaseSocketError, or logs it where the socket is not required."""
        try:
            await self._run()
        except LeaseSocketError as error:
            if is_required:
                raise
            _LOG.warning("event=no_lease_socket reason=%r", str(error))
            await asyncio.Event().wait()

    async def _run(self) -> None:
        try:
            if _is_served(self._path):
                raise LeaseSocketError(f"--lease-socket {self._path}: another agent serves it; choose another path")
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            # Nobody may connect between bind and chmod.
            before = os.umask(0o177)
            try:
                server = await asyncio.start_unix_server(self._serve, str(self._path), limit=LINE_BYTES_MOST)
            finally:
                os.umask(before)
        except OSError as error:
            raise LeaseSocketError(
                f"--lease-socket {self._path}: {error.strerror}; choose a path in a folder of the agent's user"
            ) from error
        async with server:
            try:
                await server.serve_forever()
            finally:
                self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _CONNECTIONS_MOST:
                answer: dict[str, Any] = {"ok": False, "problem": "too many ask at once; ask again"}
            elif not _is_allowed(writer.get_extra_info("socket")):
                answer = {"ok": False, "problem": "only root and the agent's user may ask for leases"}
            else:
                async with asyncio.timeout(_READ_S):
                    line = await reader.readline()
                answer = self.answer(line)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            # Whoever asked is gone, says nothing, or too much; a request that was whole has been answered or is repeated.
            pass
        finally:
            self._connections -= 1
            writer.close()

    def answer(self, line: bytes) -> dict[str, Any]:
        """Returns the answer to one line."""
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise LeaseRequestError("the request is no object")
            return handle_request(self._leases, request)
        except LeaseRefused as refused:
            return {"ok": False, "refused" if refused.passes else "failed": True, "problem": str(refused)}
        except (ValueError, RecursionError) as error:
            return {"ok": False, "problem": f"the request is not understood: {error}"}


def _is_served(path: Path) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe, contextlib.suppress(OSError):
        probe.settimeout(_AGAIN_S)
        probe.connect(str(path))
        return True
    return False


def _is_allowed(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())


def ask_agent(
    path: Path,
    request: Mapping[str, Any],
    *,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Asks a running agent, and again until the time is over if it cannot be reached; raises LeaseSocketError."""
    until_s = monotonic_s() + timeout_s
    while True:
        try:
            return _ask_once(path, request, max(0.1, until_s - monotonic_s()))
        except (OSError, ValueError) as error:
            if monotonic_s() + _AGAIN_S >= until_s:
                reason = getattr(error, "strerror", None) or str(error) or "no answer"
                raise LeaseSocketError(
                    f"{path}: no agent answers there ({reason}); start eelgrid-agent, or give its --lease-socket"
                ) from error
            sleep(_AGAIN_S)


def _ask_once(path: Path, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(json.dumps(dict(request)).encode() + b"\n")
        with connection.makefile("rb") as file:
            line = file.readline(16 * LINE_BYTES_MOST)
    answer = json.loads(line)
    return answer if isinstance(answer, dict) else {}


def read_leases(answer: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Returns the leases of an answer."""
    found = answer.get("leases")
    return found if isinstance(found, list) else ()
