"""The admission webhook of a controller on this machine: its certificate, and its registration at the API server."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trustme

from bench.kubernetes.rig import Rig, pod
from eelgrid_controller.engines.kubernetes.api.errors import ObjectAlreadyExists, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import PODS, Resource
from eelgrid_controller.engines.kubernetes.model.well_known import LABEL_MANAGED

__all__ = ["WEBHOOK_CONFIGURATIONS", "WebhookFiles", "build_registration", "webhook_registered"]

WEBHOOK_CONFIGURATIONS = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    is_namespaced=False,
)
_NAME = "eelgrid-bench"
# API servers read registrations with a delay of a second or two.
_KNOWN_WITHIN_S = 60.0


class WebhookFiles:
    """A certificate for this machine in a folder, and the controller's options for it."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("127.0.0.1")
        self.authority = authority.cert_pem.bytes()
        self._certificate, self._key = folder / "webhook.crt", folder / "webhook.key"
        self._certificate.write_bytes(leaf.cert_chain_pems[0].bytes())
        self._key.write_bytes(leaf.private_key_pem.bytes())

    @property
    def options(self) -> tuple[str, ...]:
        """Serve on a port of its own, and place pods at their admission."""
        return (
            "--webhook-listen",
            "127.0.0.1:0",
            "--webhook-certificate",
            str(self._certificate),
            "--webhook-key",
            str(self._key),
            "--kubernetes-pin-at-admission",
        )


def build_registration(
    name: str, address: str, authority: bytes, *, timeout_s: int, selector: dict[str, Any]
) -> dict[str, Any]:
    """What the API server is told of a webhook at an address: it is asked about the new pods that the selector names."""
    return {
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": "pods.place.eelgrid.io",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "NoneOnDryRun",
                "failurePolicy": "Ignore",
                "reinvocationPolicy": "IfNeeded",
                "timeoutSeconds": timeout_s,
                "clientConfig": {
                    "url": f"https://{address}/place/pods",
                    "caBundle": base64.b64encode(authority).decode(),
                },
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
                **selector,
            }
        ],
    }


@asynccontextmanager
async def webhook_registered(rig: Rig, files: WebhookFiles, address: str) -> AsyncIterator[None]:
    """The API server asks the webhook at an address about new pods with the label, from now on until the end."""
    selector = {"objectSelector": {"matchLabels": {LABEL_MANAGED: "true"}}}
    body = build_registration(_NAME, address, files.authority, timeout_s=3, selector=selector)
    with suppress(ObjectAlreadyExists):
        await rig.cluster.create(WEBHOOK_CONFIGURATIONS, body)
    try:
        async with asyncio.timeout(_KNOWN_WITHIN_S):
            while not await _is_asked(rig):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.25)
        yield
    finally:
        with suppress(ObjectNotFound):
            await rig.cluster.delete(WEBHOOK_CONFIGURATIONS, _NAME)


async def _is_asked(rig: Rig) -> bool:
    """Whether a pod comes back from its creation with a node."""
    made = await rig.cluster.create(PODS, pod("probe", mode="admission"), namespace=rig.namespace)
    await rig.cluster.delete(PODS, "probe", namespace=rig.namespace, grace_s=0)
    await rig.until(lambda: not rig.alive(), within_s=30.0)
    return bool(made["spec"].get("nodeName"))
