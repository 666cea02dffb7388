"""Workloads in YAML, as people write them.

Owns the file's shape: one or several documents, each a workload's spec with an
optional `id`, amounts either as people write them (cpu: 2.5, memory: 16GiB,
gpus: 1, gpu_share: 0.5, gpu_models: [A, B]) or as the contract has them
(cpu_milli, memory_bytes, ...), and the document that `eelctl get -o yaml`
prints. Must not know where the text comes from. Every complaint names the
document and the field.
"""

from collections.abc import Callable, Mapping
from typing import Any

from eelgrid_controller.cli.amounts import cpu_milli, gpu_milli, memory_bytes
from eelgrid_controller.cli.failure import Refused
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import SubmitWorkloadRequest
from eelgrid_protos.plain import from_plain
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["DOCUMENTS_MOST", "read_workloads"]

DOCUMENTS_MOST = 10_000
_FRIENDLY: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "cpu": ("cpu_milli", cpu_milli),
    "memory": ("memory_bytes", memory_bytes),
    "gpus": ("gpu_count", int),
    "gpu_share": ("gpu_milli", gpu_milli),
}
# What `eelctl get -o yaml` prints besides the spec: the controller's, not the user's.
_ANSWERED = frozenset(
    {
        "phase",
        "reason",
        "placements",
        "submitted_ns",
        "placed_ns",
        "ended_ns",
        "revision",
        "power_limit_w",
        "replicas_begun",
        "owner",
    }
)


def read_workloads(text: str, source: str) -> tuple[SubmitWorkloadRequest, ...]:
    """The submissions in a YAML text; raises Refused naming document and field, before any is sent."""
    import yaml

    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "is no YAML"
        raise Refused(f"{source}{place}: {problem}", "correct the YAML there") from None
    if not documents:
        raise Refused(f"{source}: holds no workload", "write at least `name:` and `request:`")
    if len(documents) > DOCUMENTS_MOST:
        raise Refused(f"{source}: holds {len(documents)} documents", f"split it: {DOCUMENTS_MOST} at most")
    return tuple(_submission(document, f"{source}, document {n}") for n, document in enumerate(documents, start=1))


def _submission(document: Any, place: str) -> SubmitWorkloadRequest:
    if not isinstance(document, Mapping):
        raise Refused(f"{place}: is no mapping", "write at least `name:` and `request:`")
    fields = dict(document)
    workload_id = fields.pop("id", fields.pop("workload_id", ""))
    if isinstance(fields.get("spec"), Mapping):
        fields = fields["spec"] | {key: value for key, value in fields.items() if key not in {"spec", *_ANSWERED}}
    try:
        if isinstance(fields.get("request"), Mapping):
            fields["request"] = _amounts(fields["request"])
        return from_plain(SubmitWorkloadRequest, {"spec": fields, "workload_id": workload_id})
    except InvalidMessage as error:
        violations = tuple(Violation(v.field.removeprefix("spec."), v.problem, v.remedy) for v in error.violations)
        raise Refused(f"{place}: {error.message}", "correct the file; nothing was sent", violations) from None


def _amounts(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with amounts as the contract has them; a GPU without a share is a whole one."""
    found = dict(request)
    for friendly, (name, read) in _FRIENDLY.items():
        if friendly not in found:
            continue
        value = found.pop(friendly)
        path = f"spec.request.{friendly}"
        if name in found:
            raise InvalidMessage("cannot read this", (Violation(path, f"stands beside {name}", "keep one of the two"),))
        try:
            found[name] = read(str(value))
        except ValueError:
            violation = Violation(
                path, f"is {value!r}", "write such as cpu: 2.5, memory: 16GiB, gpus: 1, gpu_share: 0.5"
            )
            raise InvalidMessage("cannot read this", (violation,)) from None
    if found.get("gpu_count"):
        found.setdefault("gpu_milli", GPU_MILLI_WHOLE)
    return found
