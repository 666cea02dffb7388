"""The mutating admission webhook that adds gates, for clusters without MutatingAdmissionPolicy."""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules, ReviewOutcome, review_pod
from eelgrid_controller.errors import ControllerConfigError

# An object has 3 MiB at most, by etcd's limit on requests; a review wraps one.
_BODY_BYTES_MOST = 4 * 1024 * 1024
_READ_WITHIN_S = 5.0
_AT_ONCE_MOST = 64
_PATHS = {"/gate/pods": False, "/gate/namespaces": True}


@dataclass(frozen=True, slots=True)
class WebhookFiles:
    """The server's certificate chain and its key, PEM."""

    certificate: Path
    key: Path

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a file changes."""
        stamps = []
        for path in (self.certificate, self.key):
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_ino))
            except OSError:
                stamps.append((0, 0))
        return tuple(stamps)

    def context(self) -> ssl.SSLContext:
        """For a server that asks no client for a certificate; raises OSError (ssl.SSLError too)."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        return context


class AdmissionWebhook:
    """One replica's server of admission reviews."""

    def __init__(self, rules: GateRules, files: WebhookFiles, *, log: logging.Logger) -> None:
        """`rules` are those of the chart's policy."""
        self.answers: dict[ReviewOutcome, int] = dict.fromkeys(ReviewOutcome, 0)
        self.refused = 0  # requests that were no review, too large, too slow or too many
        self.reloads = 0
        self.port = 0
        self._rules = rules
        self._files = files
        self._log = log
        self._at_once = 0
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._current: ssl.SSLContext | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, address: str) -> int:
        """Listen and return the port; raises ConfigError."""
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit() or int(port) > 65_535:
            raise ControllerConfigError(
                f"--webhook-listen {address!r} is no address", "write HOST:PORT, for example 0.0.0.0:9443"
            )
        self._stamp = self._files.stamp()
        try:
            self._current = self._files.context()
        except OSError as error:
            raise ControllerConfigError(
                f"the webhook's certificate cannot be used ({error.strerror or error})",
                "name a certificate and its key in PEM by --webhook-certificate and --webhook-key",
            ) from error
        context = self._files.context()
        # Called at each handshake, whether the client names a host or not.
        context.sni_callback = self._chosen
        application = web.Application(client_max_size=_BODY_BYTES_MOST)
        for path in _PATHS:
            application.router.add_post(path, self._review_request)
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, keepalive_timeout=90.0, shutdown_timeout=1.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host.strip("[]"), int(port), ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise ControllerConfigError(
                f"cannot serve the webhook on {address} ({error.strerror or error})",
                "choose another with --webhook-listen, or end the program that has it",
            ) from error
        self.port = self._runner.addresses[0][1]
        self._log.info("webhook=serving listen=%s:%d certificate=%s", host, self.port, self._files.certificate)
        return self.port

    async def stop(self) -> None:
        """Close the door; the API server lets pods by, or asks another replica."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _chosen(self, held: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Gives a handshake the newest certificate."""
        stamp = self._files.stamp()
        if stamp != self._stamp:
            try:
                self._current = self._files.context()
            except OSError as error:
                # Files are replaced one after the other; the next handshake looks again.
                self._log.warning("webhook_tls=kept reason=%s", error)
            else:
                self._stamp = stamp
                self.reloads += 1
                self._log.info("webhook_tls=reloaded certificate=%s", self._files.certificate)
        assert self._current is not None
        held.context = self._current

    async def _review_request(self, request: web.Request) -> web.Response:
        if self._at_once >= _AT_ONCE_MOST:
            return self._refusal(503, f"{_AT_ONCE_MOST} reviews are under way; ask again")
        self._at_once += 1
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                body = await request.read()
            review: Any = msgspec.json.decode(body)
            admitted = review_pod(review, self._rules, is_opted_in=_PATHS[request.path])
        except web.HTTPRequestEntityTooLarge:
            return self._refusal(413, f"a review has {_BODY_BYTES_MOST} bytes at most")
        except TimeoutError:
            return self._refusal(408, f"a review is sent within {_READ_WITHIN_S:g} s")
        except (msgspec.DecodeError, RecursionError) as error:
            return self._refusal(400, f"the body is no JSON ({error}); post an AdmissionReview of admission.k8s.io/v1")
        except KubernetesUnreadable as error:
            return self._refusal(400, str(error))
        finally:
            self._at_once -= 1
        self.answers[admitted.answer] += 1
        if admitted.answer is ReviewOutcome.UNREAD:
            self._log.warning("review=unread told=%s", admitted.review["response"]["warnings"][0])
        return web.Response(body=msgspec.json.encode(admitted.review), content_type="application/json")

    def _refusal(self, status: int, told: str) -> web.Response:
        self.refused += 1
        self._log.warning("review=refused status=%d reason=%s", status, told)
        return web.Response(status=status, text=f"{told}\n")
