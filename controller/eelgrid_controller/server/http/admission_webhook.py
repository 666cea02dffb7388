"""The mutating admission webhook: gates, our scheduler's name, and nodes where they are planned at admission.

`/gate/...` answers on every replica alike. `/place/...` may set the node, too; the chart sends it to the leader alone.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.pods.admission_review import (
    AdmissionPin,
    GateRules,
    ReviewOutcome,
    pin_candidate,
    review_pod,
)
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.http.application import EndpointSettings, HttpEndpoint
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.file_reloader import FileReloader, WatchFile, build_listening_context, load_key_pair
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.transport import KeyPairFiles

# An object has 3 MiB at most, by etcd's limit on requests; a review wraps one.
_BODY_BYTES_MOST = 4 * 1024 * 1024
_READ_WITHIN_S = 5.0
_AT_ONCE_MOST = 64
# By path: whether the namespace has opted in.
_PATHS = {"/gate/pods": False, "/gate/namespaces": True, "/place/pods": False, "/place/namespaces": True}
_PLACES = "/place/"
# The node of a pod as it will be created, None where none is certain now; it answers within its own bound.
PinLookup: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[AdmissionPin | None]]
_SETTINGS = EndpointSettings(
    flag="--webhook-listen",
    name="the webhook",
    example="0.0.0.0:9443",
    methods=frozenset({"POST"}),
    body_bytes_most=_BODY_BYTES_MOST,
    # API servers keep connections open that they have not used yet.
    first_request_s=90.0,
    silent_connections_most=256,
    keepalive_s=90.0,
)


def _build_context(files: KeyPairFiles) -> ssl.SSLContext:
    """For a server that asks no client for a certificate; raises OSError (ssl.SSLError too)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_key_pair(context, files.certificate, files.key)
    return context


class AdmissionWebhook:
    """One replica's server of admission reviews."""

    def __init__(self, rules: GateRules, files: KeyPairFiles, *, log: logging.Logger) -> None:
        """`rules` are those of the chart's policy."""
        self.answers: dict[ReviewOutcome, int] = dict.fromkeys(ReviewOutcome, 0)
        self.refused = 0  # requests that were no review, too large, too slow or too many
        self.port = 0
        self.find_pin: PinLookup | None = None  # None where nothing is planned at admission
        self._rules = rules
        self._files = files
        self._log = log
        self._at_once = 0
        self._endpoint: HttpEndpoint | None = None

    async def start(self, address: str) -> int:
        """Listens and returns the port; raises ControllerConfigError."""
        endpoint = HttpEndpoint(_SETTINGS, [web.post(path, self._review_request) for path in _PATHS])
        files = self._files
        try:
            self.certificates = FileReloader(self._load_context, name="webhook_tls", log=self._log)
            context = build_listening_context(lambda: _build_context(files), lambda _: self.certificates.refresh())
        except OSError as error:
            raise ControllerConfigError(
                f"the webhook's certificate cannot be used ({error.strerror or error})",
                "name a certificate and its key in PEM by --webhook-certificate and --webhook-key",
            ) from error
        self.port = await endpoint.start(address, context)
        self._endpoint = endpoint
        host = address.rpartition(":")[0]
        self._log.info("webhook=serving listen=%s:%d certificate=%s", host, self.port, files.certificate)
        return self.port

    async def stop(self) -> None:
        """Closes the listening socket; the API server lets pods by, or asks another replica."""
        if self._endpoint is not None:
            await self._endpoint.stop()

    def families(self) -> Iterator[MetricFamily]:
        """What it answered, as metrics."""
        answers = {answer.value: float(count) for answer, count in self.answers.items()}
        yield build_family("eelgrid_kubernetes_reviews_total", answers | {"refused": self.refused})

    def _load_context(self, watch: WatchFile) -> ssl.SSLContext:
        watch(self._files.certificate)
        watch(self._files.key)
        return _build_context(self._files)

    async def _review_request(self, request: web.Request) -> web.Response:
        if self._at_once >= _AT_ONCE_MOST:
            return self._refusal(503, f"{_AT_ONCE_MOST} reviews are under way; ask again")
        self._at_once += 1
        try:
            async with asyncio.timeout(_READ_WITHIN_S):
                body = await request.read()
            review: Any = msgspec.json.decode(body)
            admitted = review_pod(review, self._rules, is_opted_in=_PATHS[request.path])
            if self.find_pin is not None and admitted.candidate is not None and request.path.startswith(_PLACES):
                pin = await self.find_pin(admitted.candidate)
                admitted = admitted if pin is None else pin_candidate(admitted, pin)
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
            self._log.warning("review=unread told=%s", admitted.warning)
        return web.Response(body=msgspec.json.encode(admitted.review), content_type="application/json")

    def _refusal(self, status: int, told: str) -> web.Response:
        self.refused += 1
        self._log.warning("review=refused status=%d reason=%s", status, told)
        return web.Response(status=status, text=f"{told}\n")
