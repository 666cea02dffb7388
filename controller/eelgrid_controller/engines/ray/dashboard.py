"""Ray's dashboard: the port by which the engine reads and scales a cluster, and its adapter over HTTP.

Owns addresses, time limits, the bearer token, and how each request is spelled. Must not know what is done with a job.

Theory. A cluster is always named by its address: there is no default one, since the machine of a controller may have a Ray of
its own. Each request is bounded in time and bytes, and a failed one changes nothing here: the next look decides anew. Ray asks
for a token from the moment that a token file is there, so a 401 says how to give one. The token is read for each look,
since it may be renewed, and is never logged.

Sources: docs.ray.io (Jobs API, State API, token authentication, Serve's external scaling), tried on Ray 2.60.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp

from eelgrid_controller.engines.ray.answers import ANSWER_BYTES_MOST, ELEMENTS_MOST, RayAnswers, RayUnreadable

_SAID_MOST = 300
_TOKEN_MOST = 16_384
_DETAILS_AT_ONCE = 8
_STATE = f"?detail=true&limit={ELEMENTS_MOST}"
_RUNNING = "&filter_keys=state&filter_predicates=%3D&filter_values=RUNNING"
_ALIVE = "&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"


class RayFailed(Exception):
    """A request to Ray failed, or was not answered in time; the message says what helps, `status` is HTTP's or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class RayPort(Protocol):
    """One cluster, as the engine uses it. Every call raises RayFailed."""

    async def read_look(self, detailed: Sequence[str]) -> RayAnswers:
        """Returns what a look reads, with the statistics of these nodes as far as they answer."""

    async def read_applications(self) -> bytes:
        """Returns Serve's applications as JSON."""

    async def scale_deployment(self, application: str, deployment: str, replicas: int) -> None:
        """Gives a deployment of Serve its number of replicas."""

    async def stop_job(self, submission_id: str) -> None:
        """Stops a job of the Jobs API; harmless for one that has ended."""

    async def close(self) -> None:
        """Ends all connections."""


class RayDashboard:
    """The dashboard of one cluster."""

    def __init__(self, address: str, *, token_file: Path | None = None, timeout_s: float = 10.0) -> None:
        """`address` is such as http://head:8265; `token_file` holds the cluster's token."""
        self._address, self._token_file, self._timeout_s = address.rstrip("/"), token_file, timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Ends all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def read_look(self, detailed: Sequence[str]) -> RayAnswers:
        """Returns what a look reads, with the statistics of these nodes as far as they answer."""
        nodes, actors, tasks, groups, jobs = await asyncio.gather(
            self._get(f"/api/v0/nodes{_STATE}"),
            self._get(f"/api/v0/actors{_STATE}{_ALIVE}"),
            self._get(f"/api/v0/tasks{_STATE}{_RUNNING}"),
            self._get(f"/api/v0/placement_groups{_STATE}"),
            self._get("/api/jobs/"),
        )
        turns, details = asyncio.Semaphore(_DETAILS_AT_ONCE), dict[str, bytes]()

        async def read_detail(node_id: str) -> None:
            # A node that does not answer has no known GPUs, and is no reason to know nothing of the others.
            async with turns:
                with contextlib.suppress(RayFailed):
                    details[node_id] = await self._get(f"/nodes/{quote(node_id, safe='')}")

        await asyncio.gather(*map(read_detail, detailed))
        return RayAnswers(nodes=nodes, actors=actors, tasks=tasks, groups=groups, jobs=jobs, details=details)

    async def read_applications(self) -> bytes:
        """Returns Serve's applications as JSON."""
        return await self._get("/api/serve/applications/")

    async def scale_deployment(self, application: str, deployment: str, replicas: int) -> None:
        """Gives a deployment of Serve its number of replicas."""
        path = f"/api/v1/applications/{quote(application, safe='')}/deployments/{quote(deployment, safe='')}/scale"
        await self._request("POST", path, {"target_num_replicas": replicas})

    async def stop_job(self, submission_id: str) -> None:
        """Stops a job of the Jobs API; harmless for one that has ended."""
        await self._request("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop")

    async def _get(self, path: str) -> bytes:
        return await self._request("GET", path)

    def _read_token(self) -> str:
        if self._token_file is None:
            return ""
        try:
            with self._token_file.open(encoding="ascii") as file:
                return file.read(_TOKEN_MOST).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RayFailed(f"the token {self._token_file} cannot be read: {error}; correct --ray-token-file") from None

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        headers, token = {"Accept": "application/json"}, self._read_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        where = path.partition("?")[0]
        try:
            async with self._session.request(
                method, self._address + path, json=body, headers=headers, allow_redirects=False
            ) as answer:
                text = await _read_body(answer)
                status = answer.status
        except TimeoutError:
            raise RayFailed(f"{where} was not answered in {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RayFailed(
                f"{self._address} is not reached: {str(error)[:_SAID_MOST]}; give --ray the address of its dashboard"
            ) from None
        if status in (401, 403):
            given = "has refused the token of --ray-token-file" if token else "asks for a token: give --ray-token-file"
            raise RayFailed(f"{where}: Ray {given} ({status})", status)
        if status != 200:
            raise RayFailed(f"{where}: {status} {text[:_SAID_MOST].decode(errors='replace')}", status)
        return text


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    pieces, size = [], 0
    async for piece in answer.content.iter_chunked(2**16):
        size += len(piece)
        if size > ANSWER_BYTES_MOST:
            raise RayUnreadable(f"the answer has more than {ANSWER_BYTES_MOST} bytes")
        pieces.append(piece)
    return b"".join(pieces)
