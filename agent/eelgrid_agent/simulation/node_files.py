"""The state file of a simulated node, which outlives a program.

It keeps MIG mode, instances and processes of a simulated node between two programs: a real device
keeps its layout while programs come and go, a simulated one dies with its program. It is plain JSON for people to read
and edit: put a process on an instance, let another program hold a device, take rights away, or complete a pending mode
change.

    {"schema": 1, "node": "n", "rights": "root", "gpus": [{
       "product": "a100-sxm4-40gb", "mig": true, "pending": true,
       "instances": [{"profile": "3g", "start": 4, "compute": [[2, 0], [1, 2]]}],
       "processes": [{"pid": 4711, "instance": 2, "compute": 0}], "clients": ["dcgm"]}]}

`compute` lists the slices and the first slice of each compute instance; `rights` is root, mig_config, mig_monitor or
read_only, and may be left out. Power, clocks and counters start afresh in each program.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.mig import DriverRefused
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import NodeSpec
from eelgrid_agent.state_files import replace_file
from eelgrid_protos.messages import AccessLevel

_SCHEMA = 1
_STATE_BYTES_MOST = 4 * 1024 * 1024
# People read and edit the file.
_MODE = 0o644
_RIGHTS = {level.name.lower(): level for level in AccessLevel if level is not AccessLevel.UNSPECIFIED}


class NodeStateFileError(ValueError):
    """The file does not describe this node; the message names the file and what to do."""


def drop_layouts(spec: NodeSpec) -> NodeSpec:
    """Returns the node with MIG off everywhere, as `load_node_state` expects it."""
    return replace(spec, gpus=tuple(replace(gpu, mig=None) for gpu in spec.gpus))


def save_node_state(node: SimulatedNode, path: Path) -> None:
    """Replaces the file as a whole; raises NodeStateFileError."""
    document = {
        "schema": _SCHEMA,
        "node": node.spec.node_name,
        "rights": node.operations.rights.name.lower(),
        "gpus": [_gpu_out(gpu) for gpu in node.devices],
    }
    try:
        replace_file(path, (json.dumps(document, indent=1) + "\n").encode(), mode=_MODE)
    except OSError as error:
        raise NodeStateFileError(f"{path}: cannot be written ({error.strerror}); make it writable") from None


def load_node_state(node: SimulatedNode, path: Path) -> None:
    """Brings a node with MIG off to the state in the file; raises NodeStateFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_STATE_BYTES_MOST + 1)
    except OSError as error:
        raise NodeStateFileError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    try:
        problem = (
            f"has more than {_STATE_BYTES_MOST} bytes"
            if len(content) > _STATE_BYTES_MOST
            else _restore_node(node, json.loads(content))
        )
    except (ValueError, TypeError, LookupError, DriverRefused, RecursionError) as error:
        problem = f"does not describe this node ({error})"
    if problem:
        raise NodeStateFileError(f"{path}: {problem}; correct it, or remove it to start again from the fleet file")


def _restore_node(node: SimulatedNode, document: dict[str, Any]) -> str:
    """Brings the node there; returns what is wrong with the document, or nothing."""
    if document["schema"] != _SCHEMA:
        return f"does not have schema {_SCHEMA}"
    if document["node"] != node.spec.node_name or len(document["gpus"]) != len(node.devices):
        return f"is of another node than {node.spec.node_name}"
    rights = str(document.get("rights", "root"))
    if rights not in _RIGHTS:
        return f"has unknown rights {rights!r}; choose one of {', '.join(_RIGHTS)}"
    node.faults.set_rights(_RIGHTS[rights])
    for gpu, fields in zip(node.devices, document["gpus"], strict=True):
        if fields["product"] != gpu.product.key:
            return f"GPU {gpu.identity.index} is not a {gpu.product.key} in it"
        _gpu_in(gpu, fields)
    return ""


def _gpu_out(gpu: SimGpu) -> dict[str, Any]:
    mig = gpu.mig
    return {
        "product": gpu.product.key,
        "mig": mig.enabled,
        "pending": mig.pending,
        "instances": [
            {
                "profile": instance.profile.key,
                "start": instance.start,
                "compute": [
                    [child.profile.compute_slices, child.start] for _, child in sorted(instance.compute.items())
                ],
            }
            for _, instance in sorted(mig.instances.items())
        ],
        "processes": [
            {"pid": pid, "instance": instance, "compute": compute} for pid, (instance, compute) in mig.holds.items()
        ],
        "clients": sorted(mig.clients),
    }


def _gpu_in(gpu: SimGpu, fields: dict[str, Any]) -> None:
    mig = gpu.mig
    if fields["mig"]:
        mig.apply_layout(())
    if fields["pending"] != fields["mig"]:
        mig.set_mode(enabled=fields["pending"])
    for row in fields["instances"]:
        profile = None if mig.geometry is None else mig.geometry.profile(row["profile"])
        if profile is None:
            raise ValueError(f"{gpu.product.key} has no profile {row['profile']!r}")
        instance = mig.create_instance(profile.id, row["start"])
        by_slices = {ci.compute_slices: ci.id for ci in profile.compute_instances}
        for slices, start in row["compute"]:
            mig.create_compute(instance.id, by_slices[slices], start)
    for row in fields["processes"]:
        mig.holds[int(row["pid"])] = (row["instance"], row["compute"])
    mig.clients.update(map(str, fields.get("clients", ())))
