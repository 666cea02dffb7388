"""Suspended jobs, and what is known of their profiles, in a few words."""

from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.model.objects import parse_node
from eelgrid_controller.engines.kubernetes.pods.suspended_job import CandidateNode, SizeMeasurement
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import RightSizingInputs

H100, A100 = "H100-80GB-HBM3", "A100-SXM4-80GB"
# Two GPUs are a little faster than half of four, at a little less than half of the watts.
HALVES = {1: (2.6, 560.0), 2: (5.2, 1_080.0), 4: (10.0, 2_400.0), 8: (17.0, 5_000.0)}


def known(speeds=None, *, model=H100, mig=""):
    """Measured throughput and watts by GPUs."""
    return tuple(
        SizeMeasurement(model, mig, gpus, hz, hz, watts, watts) for gpus, (hz, watts) in (speeds or HALVES).items()
    )


def node(name="n0", *, gpus=8, product="NVIDIA-H100-80GB-HBM3", labels=None, **resources):
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", **resources}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {well_known.NODE_GPU_PRODUCT: product, **(labels or {})},
        },
        "spec": {},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def site(name="n0", *, model=H100, gpus=8, labels=None, **resources):
    return CandidateNode(parse_node(node(name, gpus=gpus, labels=labels, **resources)), model, gpus)


def ground(*, sites=None, points=None, now_s=1_000_000.0, **more):
    return RightSizingInputs(
        now_s, (site(),) if sites is None else tuple(sites), {"bert": known()} if points is None else points, **more
    )


def template(*, gpus=4, labels=None, **notes):
    amounts = {"nvidia.com/gpu": str(gpus)}
    container = {"name": "main", "image": "x", "env": [{"name": "A", "value": "b"}], "resources": {"limits": amounts}}
    container["resources"]["requests"] = dict(amounts)
    return {
        "metadata": {"labels": labels or {}, "annotations": notes},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "side", "image": "y"}, container]},
    }


def job(name="j", *, asks=4, pods=1, version="7", generation=1, queue="", labels=None, spec=None, status=None, **notes):
    """A suspended Job that asks to be right-sized; notes are annotations of ours, with underscores for dashes."""
    own = {
        well_known.ANNOTATION_RIGHT_SIZE: "true",
        well_known.ANNOTATION_PROFILE: "bert",
        well_known.ANNOTATION_GPUS: "1, 2, 4, 8",
        **{f"eelgrid.io/{key.replace('_', '-')}": value for key, value in notes.items()},
    }
    own = {key: value for key, value in own.items() if value is not None}
    its = {well_known.LABEL_MANAGED: "true", **({well_known.KUEUE_QUEUE: queue} if queue else {}), **(labels or {})}
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "generation": generation,
            "labels": its,
            "annotations": own,
        },
        "spec": {
            "suspend": True,
            "parallelism": pods,
            "completions": pods,
            "template": template(gpus=asks),
            **(spec or {}),
        },
        "status": status or {},
    }


def gated(found, *others):
    """The same, held back from Kueue by us, too."""
    found["metadata"]["annotations"][well_known.KUEUE_GATED_BY] = ",".join([*others, well_known.KUEUE_OUR_GATE])
    return found
