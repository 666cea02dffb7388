"""Slurm's REST: jobs and nodes read from slurmrestd instead of by commands, which goes on by commands where it does not answer.

Owns addresses, the version that is asked for, tokens, time limits, and when commands are used instead. Must not know what is
done with an answer; changes and columns of jobs are commands' in any case.

Theory. slurmrestd serves the forms that `--json` of the commands prints, one data parser for each version in its paths. Which
it has it says itself (/openapi/v3): the newest that is read here is taken, and asked for again after a 404, since an upgrade may
have dropped it. Whether its answers are read is found out before they are relied on, by the first of each kind. Whatever fails,
the commands answer, and the reason is told once until it is another; after a while slurmrestd is asked again. Each request is
bounded in time and bytes. A socket's permissions are its authentication; over TCP a JWT is, which is read for each request, as
it may be renewed, and never logged.

Sources: slurmrestd(8), slurm.schedmd.com/rest_api.html, slurm.schedmd.com/jwt.html; tried on 22.05.8 (v0.0.38).
"""

import asyncio
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.slurm.answers import ANSWER_BYTES_MOST, SlurmUnreadable, parse_jobs, parse_nodes
from eelgrid_controller.engines.slurm.commands import SlurmCommandLine, SlurmFailed

# v0.0.38 to v0.0.45, of 22.05 to 25.11: those of which answers are read (tests/contracts).
READ_VERSIONS = range(38, 46)
_VERSION_PATH = re.compile(r"/slurm/v0\.0\.([0-9]{1,4})/jobs/?")
_NO_ERRORS = re.compile(rb'"errors"\s*:\s*\[\s*\]')
_TOKEN_MOST, _SAID_MOST, _CHUNK = 16_384, 300, 65_536
_PATHS_BYTES_MOST = 16 * 2**20
# For so long commands are used after a failure.
_AGAIN_S = 60.0
_UNIX = "unix:"


class SlurmRest:
    """One slurmrestd."""

    def __init__(
        self, address: str, *, token_file: Path | None = None, user: str = "", timeout_s: float = 10.0
    ) -> None:
        """`address` is such as unix:/run/slurmrestd.sock or http://ctld:6820; the token is `user`'s, or its own subject's."""
        self._address, self._token_file, self._user, self._timeout_s = address.rstrip("/"), token_file, user, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._version: int | None = None

    async def close(self) -> None:
        """Ends all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def read(self, kind: str) -> bytes:
        """Returns all `jobs` or `nodes` as JSON; raises SlurmFailed."""
        if self._version is None:
            self._version = await self._find_version()
        path = f"/slurm/v0.0.{self._version}/{kind}"
        status, text = await self._get(path, ANSWER_BYTES_MOST)
        if status == 404:
            self._version = None
        if status != 200:
            raise SlurmFailed(f"{path}: slurmrestd answers {status}{_quote(text)}")
        if not _NO_ERRORS.search(text):
            # "No jobs" beside an error would end all of them here.
            raise SlurmFailed(f"{path}: slurmrestd does not say that there was no error")
        return text

    async def _find_version(self) -> int:
        status, text = await self._get("/openapi/v3", _PATHS_BYTES_MOST)
        if status != 200:
            raise SlurmFailed(f"/openapi/v3: slurmrestd answers {status}{_quote(text)}")
        try:
            paths = json.loads(text)["paths"]
            offered = sorted({int(found[1]) for path in paths if (found := _VERSION_PATH.fullmatch(path))})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SlurmFailed("/openapi/v3 has no paths: this is no slurmrestd") from None
        known = [version for version in offered if version in READ_VERSIONS]
        if not known:
            have = ", ".join(f"v0.0.{version}" for version in offered[:20]) or "no version of openapi/slurm"
            first, last = READ_VERSIONS[0], READ_VERSIONS[-1]
            raise SlurmFailed(
                f"slurmrestd has {have}, and v0.0.{first} to v0.0.{last} are read; start it with one of these (-s, -d)"
            )
        return known[-1]

    async def _get(self, path: str, bytes_most: int) -> tuple[int, bytes]:
        session, base = self._open_session()
        try:
            async with session.get(base + path, headers=self._make_headers(), allow_redirects=False) as answer:
                text, status = await _read_body(answer, bytes_most), answer.status
        except TimeoutError:
            raise SlurmFailed(f"{path}: slurmrestd did not answer in {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            said = str(error)[:_SAID_MOST] or type(error).__name__
            raise SlurmFailed(f"{self._address} is not reached: {said}; correct --slurm-rest") from None
        if status in (401, 403):
            given = "has refused the token of" if self._token_file is not None else "asks for a token: give"
            raise SlurmFailed(f"{path}: slurmrestd {given} --slurm-rest-token-file ({status})")
        return status, text

    def _open_session(self) -> tuple[aiohttp.ClientSession, str]:
        path = self._address.removeprefix(_UNIX) if self._address.startswith(_UNIX) else None
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            # Without a connector of its own a session uses TCP.
            connector = aiohttp.TCPConnector() if path is None else aiohttp.UnixConnector(path=path)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False, connector=connector)
        return self._session, self._address if path is None else "http://localhost"

    def _make_headers(self) -> Mapping[str, str]:
        headers = {"Accept": "application/json"}
        if self._token_file is None:
            return headers
        try:
            with self._token_file.open(encoding="ascii") as file:
                headers["X-SLURM-USER-TOKEN"] = file.read(_TOKEN_MOST).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SlurmFailed(
                f"the token {self._token_file} cannot be read: {error}; correct --slurm-rest-token-file"
            ) from None
        if self._user:
            headers["X-SLURM-USER-NAME"] = self._user
        return headers


class SlurmRestReader(SlurmCommandLine):
    """Slurm's commands, of which two are answered by slurmrestd as long as it does."""

    def __init__(
        self,
        rest: SlurmRest,
        *,
        clock: Clock,
        log: logging.Logger,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` and `environment` are those of the commands."""
        super().__init__(folder=folder, environment=environment)
        self._rest, self._clock, self._log = rest, clock, log
        self._again_s, self._problem = -math.inf, ""
        # Kinds of answers of which one was read.
        self._checked: set[str] = set()

    async def read_jobs(self) -> bytes:
        """Returns all jobs as JSON."""
        return await self._read("jobs", super().read_jobs)

    async def read_nodes(self) -> bytes:
        """Returns all nodes as JSON."""
        return await self._read("nodes", super().read_nodes)

    async def _read(self, kind: str, run: Callable[[], Awaitable[bytes]]) -> bytes:
        now_s = self._clock.monotonic_s()
        if now_s < self._again_s:
            return await run()
        try:
            text = await self._rest.read(kind)
            if kind not in self._checked:
                await asyncio.to_thread(_check_answer, kind, text)
                self._checked.add(kind)
        except (SlurmFailed, SlurmUnreadable) as error:
            self._again_s = now_s + _AGAIN_S
            self._checked.clear()
            if str(error) != self._problem:
                self._problem = str(error)
                self._log.warning("slurm=rest read=no error=%s: commands are used, and it is tried again", error)
            return await run()
        if self._problem:
            self._problem = ""
            self._log.info("slurm=rest read=yes")
        return text


def _check_answer(kind: str, text: bytes) -> None:
    """Raises SlurmUnreadable for an answer of which nothing can be read; a single element is left out, as from commands."""
    if kind == "jobs":
        jobs = parse_jobs(text)
        readable, unreadable = len(jobs.jobs), jobs.unreadable
    else:
        nodes = parse_nodes(text)
        readable, unreadable = len(nodes.nodes), nodes.unreadable
    if unreadable and not readable:
        raise SlurmUnreadable(f"none of its {len(unreadable)} {kind} can be read: {unreadable[0]}")


async def _read_body(answer: aiohttp.ClientResponse, bytes_most: int) -> bytes:
    found, size = list[bytes](), 0
    async for chunk in answer.content.iter_chunked(_CHUNK):
        found.append(chunk)
        size += len(chunk)
        if size > bytes_most:
            raise SlurmFailed(f"slurmrestd answers with more than {bytes_most} bytes")
    return b"".join(found)


def _quote(text: bytes) -> str:
    said = " ".join(text[:_SAID_MOST].decode(errors="replace").split())
    return f": {said}" if said else ""
