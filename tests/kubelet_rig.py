"""A real Kubernetes with one real kubelet, as the tests of both plugins use it: pods, claims and what was given.

Owns the calls. Its API client is the agent's own, so that it, too, meets a real server.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import grpc.aio

from eelgrid_agent.kubelet.kube_client import ApiAddress, ApiConflict, ApiNotFound, KubeApiClient
from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER
from eelgrid_controller.engines.kubernetes.api.kubeconfig import ClusterAccess
from eelgrid_protos.kubelet_api import LIST_PATH, encode_list_request, parse_containers
from eelgrid_protos.wire.pod_resources_pb2 import AllocatableResourcesResponse

PODS = "/api/v1/namespaces/default/pods"
RESOURCE = "/apis/resource.k8s.io/v1"
CLAIMS = f"{RESOURCE}/namespaces/default/resourceclaims"
TEMPLATES = f"{RESOURCE}/namespaces/default/resourceclaimtemplates"
CLASS = "eelgrid-gpu"


class RealCluster:
    def __init__(self, url, credentials, folder, node):
        self.address = ApiAddress(url=url, credentials=credentials)
        self.folder, self.node, self._credentials = Path(folder), node, credentials
        self.api = self.client()

    @classmethod
    def of(cls, environment, folder, node):
        credentials = Path(tempfile.mkdtemp(prefix="eelgrid-test-"))
        shutil.copy(environment["K8S_CA"], credentials / "ca.crt")
        (credentials / "token").write_text(environment["K8S_TOKEN"])
        return cls(environment["K8S_API"], credentials, folder, node)

    def close(self):
        self.api.close()
        shutil.rmtree(self._credentials)

    def access(self):
        """The same, as a controller is given it."""
        token, authority = ((self._credentials / name).read_bytes() for name in ("token", "ca.crt"))
        return ClusterAccess(server=self.address.url, authority_pem=authority, token=token.decode())

    def client(self):
        return KubeApiClient(self.address, sleep=time.sleep)

    # Objects

    def put(self, collection, kind, name, version="resource.k8s.io/v1", **content):
        with suppress(ApiConflict):
            self.api.create(collection, {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content})

    def pod(self, name, *, claim=None, resource=None, count=1, gates=()):
        """A pod with one container that never ends, with a claim by template or a resource of a device plugin."""
        limits = {} if resource is None else {"limits": {resource: str(count)}}
        container = {"name": "c", "image": "x", "resources": limits}
        spec = {"terminationGracePeriodSeconds": 0, "containers": [container], "automountServiceAccountToken": False}
        if gates:
            spec["schedulingGates"] = [{"name": gate} for gate in gates]
        if claim is not None:
            spec["resourceClaims"] = [{"name": "g", "resourceClaimTemplateName": claim}]
            container["resources"] = {"claims": [{"name": "g"}]}
        self.put(PODS, "Pod", name, "v1", spec=spec)

    def prepare_claims(self):
        """A class of all our devices, and a template for one of them."""
        selector = {"cel": {"expression": f"device.driver == '{DRA_DRIVER}'"}}
        self.put(f"{RESOURCE}/deviceclasses", "DeviceClass", CLASS, spec={"selectors": [selector]})
        devices = {"requests": [{"name": "r", "exactly": {"deviceClassName": CLASS}}]}
        self.put(TEMPLATES, "ResourceClaimTemplate", "one", spec={"spec": {"devices": devices}})

    def claim_of(self, pod):
        """The claim that was made for a pod, or None yet."""
        statuses = self.api.get(f"{PODS}/{pod}").get("status", {}).get("resourceClaimStatuses", ())
        names = [one["resourceClaimName"] for one in statuses if "resourceClaimName" in one]
        return self.api.get(f"{CLAIMS}/{names[0]}") if names else None

    def allocate(self, claim, device):
        """What the controller writes: this device, and the node by its name."""
        result = {"request": "r", "driver": DRA_DRIVER, "pool": self.node, "device": device}
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [self.node]}]}
        allocation = {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [term]},
            "allocationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        name = claim["metadata"]["name"]
        self.api.replace(f"{CLAIMS}/{name}/status", {**claim, "status": {"allocation": allocation}})

    def phase(self, pod):
        try:
            return self.api.get(f"{PODS}/{pod}")["status"].get("phase", "")
        except ApiNotFound:
            return "gone"

    def starts(self, pod):
        """How often a pod's container was started, and its id: neither changes while it runs undisturbed."""
        (status,) = self.api.get(f"{PODS}/{pod}")["status"]["containerStatuses"]
        return status["restartCount"], status["containerID"]

    def scheduled(self, pod):
        """The scheduler's word on a pod that is not bound; empty where it is, or was not looked at."""
        conditions = self.api.get(f"{PODS}/{pod}")["status"].get("conditions", ())
        return next((one.get("message", "") for one in conditions if one["type"] == "PodScheduled"), "")

    def allocatable(self):
        return self.api.get(f"/api/v1/nodes/{self.node}")["status"]["allocatable"]

    def restart_kubelet(self):
        """Ends the kubelet and starts it anew; False where nobody says how."""
        start, pid = self.folder / "start-kubelet.sh", self.folder / "kubelet.pid"
        if not (start.exists() and pid.exists()):
            return False
        os.kill(int(pid.read_text()), signal.SIGTERM)
        time.sleep(1.0)
        subprocess.run([start], check=True, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return True

    def sweep(self):
        """No pods from now on, whatever a test left."""
        for pod in self.api.get(PODS)["items"]:
            self.delete(pod["metadata"]["name"])

    def delete(self, pod):
        with suppress(ApiNotFound):
            self.api.delete(f"{PODS}/{pod}")

    # What was given

    def created(self, pod):
        """What the container runtime was told of a pod's container."""
        for line in (self.folder / "cri-events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if (
                "create_container" in (event.get("event"), event.get("call"), event.get("op"))
                and event.get("pod") == pod
            ):
                return event
        return None

    async def held(self):
        """By pod what its container holds, as the kubelet says."""
        return {one.pod: one for one in parse_containers(await self._asked(LIST_PATH))}

    async def gives(self, *uuids):
        """Waits until the kubelet would give these of a device plugin; the API server hears of it later."""
        async with asyncio.timeout(40):
            while True:
                # A kubelet that starts makes its socket late.
                with suppress(grpc.aio.AioRpcError):
                    answer = await self._asked("/v1.PodResourcesLister/GetAllocatableResources")
                    found = AllocatableResourcesResponse.FromString(answer)
                    if {uuid for one in found.devices for uuid in one.device_ids} >= set(uuids):
                        return
                await asyncio.sleep(0.1)

    async def _asked(self, path):
        socket = self.folder / "pod-resources" / "kubelet.sock"
        options = [("grpc.default_authority", "localhost")]
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
            return await channel.unary_unary(path)(encode_list_request(), timeout=10)

    async def until(self, ask, within_s=40.0):
        """Asks until the answer is one; returns it."""
        async with asyncio.timeout(within_s):
            while not (answer := await asyncio.to_thread(ask)):  # noqa: ASYNC110  # it is in another process
                await asyncio.sleep(0.05)
            return answer
