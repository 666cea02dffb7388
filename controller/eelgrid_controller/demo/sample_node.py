"""One node with an agent of its own, for the demo that is kept, and work for it.

Owns what it is and what runs on it. Must not start anything. An agent that
simulates a whole fleet shows no series of nodes and devices, or a page would
have millions; one with a single node shows all that a real one would: devices,
MIG slices, owners.
"""

import json
from pathlib import Path

from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadKind, WorkloadSpec

__all__ = ["NAME", "submissions", "write_node"]

NAME = "demo-node"
# An agent of one node asks through NVML, which tells products: the model is the catalogue's.
_PRODUCT, _MODEL = "a100-sxm4-40gb", "A100-SXM4-40GB"
_GIB = 1024**3
_NODE = {
    "name": NAME,
    "count": 1,
    "cpu_milli": 96_000,
    "memory_bytes": 768 * _GIB,
    "pool": "demo",
    "topology": "zone-a/spine-1/rack-1",
    "gpus": [
        {"product": _PRODUCT, "count": 3},
        {"product": _PRODUCT, "mig": ["3g@4", "1g.5gb@0"]},
    ],
}


def write_node(path: Path) -> None:
    """The fleet file of this one node."""
    path.write_text(json.dumps({"nodes": [_NODE]}) + "\n", encoding="utf-8")


def submissions() -> tuple[SubmitWorkloadRequest, ...]:
    """A training job on two devices and a service with two shares of the third: no other node has this model."""
    return (
        _submission("demo-train", WorkloadKind.TRAINING_JOB, user="ann", gpu_count=2, gpu_milli=1000),
        _submission("demo-serve-a", WorkloadKind.INFERENCE_SERVICE, user="bob", gpu_count=1, gpu_milli=500),
        _submission("demo-serve-b", WorkloadKind.INFERENCE_SERVICE, user="bob", gpu_count=1, gpu_milli=300),
    )


def _submission(name: str, kind: WorkloadKind, *, user: str, gpu_count: int, gpu_milli: int) -> SubmitWorkloadRequest:
    request = ResourceRequest(
        cpu_milli=4000, memory_bytes=16 * _GIB, gpu_count=gpu_count, gpu_milli=gpu_milli, gpu_models=(_MODEL,)
    )
    spec = WorkloadSpec(name=name, kind=kind, namespace="demo", user=user, request=request, labels={"team": "demo"})
    return SubmitWorkloadRequest(workload_id=name, spec=spec)
