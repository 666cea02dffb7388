"""The one patch that a suspended job gets, and the record of it.

Owns the shape of both. Must not know why a size was chosen, nor who sends the patch.

Theory. A JSON patch names just the fields that change, so nothing that anybody else wrote is sent
back. It carries uid and resource version: a job that changed since it was looked at answers 409, as it
does after a patch whose answer was lost. Request, record, Kueue's gate and `suspend` go in one patch: no moment
exists in which the job may start and is not right-sized, or is right-sized and nobody knows by whom.

The record says what was there, so that people can put it back.

Source: RFC 6902; KEP-6915 of Kueue for the gate, from which entries may only be taken.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from eelgrid_controller.kubernetes import names
from eelgrid_controller.kubernetes.jobs_asked import Asked, Part, Wish
from eelgrid_controller.kubernetes.right_sizing import Choice, Size

__all__ = ["is_recorded", "outcome_of", "record_of", "releasing", "resource_of", "right_sizing"]

_LONGEST = 1_000  # of a reason
Operations = list[dict[str, Any]]


def resource_of(size: Size) -> str:
    """The resource that a size asks for."""
    return f"{names.RESOURCE_MIG_PREFIX}{size.mig_profile}" if size.mig_profile else names.RESOURCE_GPU


def record_of(uid: str, outcome: str, why: str, *, asked: Size | None = None, choice: Choice | None = None) -> str:
    """What was done to a job, for people and for us: `changed`, `kept` or `recommended`."""
    record: dict[str, Any] = {"job": uid, "outcome": outcome, "why": why[:_LONGEST]}
    if asked is not None:
        record["before"] = _size(asked)
    if choice is not None and choice.size != asked:
        record |= {"after": _size(choice.size), "energy": round(choice.ratio, 4), "speed": round(choice.speed, 4)}
    if choice is not None:
        record["joules"] = {
            model: [float(f"{one:.4g}") for one in pair] for model, pair in sorted(choice.energy_j.items())
        }
        record["basis"] = ", ".join(choice.bases)
    return json.dumps(record, separators=(",", ":"))


def is_recorded(job: Asked) -> bool:
    """Whether this very job was dealt with: a record that was copied along with a manifest is of another."""
    return bool(outcome_of(job))


def outcome_of(job: Asked) -> str:
    """What was done to this very job: `changed`, `kept`, `recommended`; empty where nothing was."""
    if not job.record:
        return ""
    try:
        found = json.loads(job.record)
    except ValueError:
        return ""
    is_its = isinstance(found, Mapping) and found.get("job") == job.uid
    return str(found.get("outcome", "")) if is_its else ""


def right_sizing(job: Asked, record: str, *, wish: Wish | None, size: Size | None, starts: bool) -> Operations:
    """The patch: the record, the request where a size is given, our gate's removal, and the start where it is ours."""
    made = [*_same(job), _add(("metadata", "annotations", names.ANNOTATION_RIGHT_SIZED), record), *_ungated(job)]
    if size is not None:
        assert wish is not None, "a size comes of a wish"
        for part in wish.parts:
            made += _request(part, wish.asked, size)
        if size.pods != wish.asked.pods:
            made += [_replace(("spec", field), size.pods) for field in ("parallelism", "completions")]
    if starts:
        where = ("spec", "runPolicy", "suspend") if job.kind == "PyTorchJob" else ("spec", "suspend")
        made.append(_replace(where, False))
    return made


def releasing(job: Asked) -> Operations:
    """The patch that takes our gate away and changes nothing else."""
    return [*_same(job), *_ungated(job)]


def _same(job: Asked) -> Operations:
    metadata = (("uid", job.uid), ("resourceVersion", job.version))
    return [_replace(("metadata", field), value) for field, value in metadata]


def _ungated(job: Asked) -> Operations:
    if not job.is_gated:
        return []
    path = ("metadata", "annotations", names.KUEUE_GATED_BY)
    left = [gate for gate in job.gates if gate != names.KUEUE_OUR_GATE]
    return [_replace(path, ",".join(left)) if left else {"op": "remove", "path": _pointer(path)}]


def _request(part: Part, asked: Size, size: Size) -> Operations:
    made: Operations = []
    before, after = resource_of(asked), resource_of(size)
    for field in part.where:
        path = (*part.path, "spec", "containers", str(part.container), "resources", field)
        if before != after:
            made.append({"op": "remove", "path": _pointer((*path, before))})
        made.append(_add((*path, after), str(size.gpus)))
    return made


def _size(size: Size) -> dict[str, Any]:
    return {"pods": size.pods, "resource": resource_of(size), "count": size.gpus}


def _add(path: Iterable[str], value: object) -> dict[str, Any]:
    return {"op": "add", "path": _pointer(path), "value": value}


def _replace(path: Iterable[str], value: object) -> dict[str, Any]:
    return {"op": "replace", "path": _pointer(path), "value": value}


def _pointer(path: Iterable[str]) -> str:
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)
