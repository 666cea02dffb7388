"""State of a simulated node between two programs: MIG mode, instances and processes, in a JSON file.

A real device keeps its layout while programs come and go; a simulated one dies
with its program. The file is plain JSON for people to read and to change: they
may put a process on an instance there, let another program hold a device, take
rights away, or make a pending mode come true.

    {"schema": 1, "node": "n", "rights": "root", "gpus": [{
       "product": "a100-sxm4-40gb", "mig": true, "pending": true,
       "instances": [{"profile": "3g", "start": 4, "compute": [[2, 0], [1, 2]]}],
       "processes": [{"pid": 4711, "instance": 2, "compute": 0}], "clients": ["dcgm"]}]}

`compute` has the slices and the first slice of each compute instance; `rights`
is root, mig_config, mig_monitor or read_only, and may be left out. Power,
clocks and counters are as at first in each program.

NodeStateFileError               the file does not describe this node
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.mig import DriverRefused
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import NodeSpec
from eelgrid_protos.messages import AccessLevel

_SCHEMA = 1
_BYTES_MOST = 4 * 1024 * 1024
_RIGHTS = {level.name.lower(): level for level in AccessLevel if level is not AccessLevel.UNSPECIFIED}


class NodeStateFileError(ValueError):
    """The file does not describe this node; the message names the file and what to do."""


def drop_layouts(spec: NodeSpec) -> NodeSpec:
    """The node with MIG off everywhere, as `resume` wants it."""
    return replace(spec, gpus=tuple(replace(gpu, mig=None) for gpu in spec.gpus))


def save_node_state(node: SimulatedNode, path: Path) -> None:
    """Writes the file anew, whole or not at all; raises StateFileError."""
    document = {
        "schema": _SCHEMA,
        "node": node.spec.node_name,
        "rights": node.operations.rights.name.lower(),
        "gpus": [_gpu_out(gpu) for gpu in node.devices],
    }
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        os.replace(fresh, path)  # noqa: PTH105
    except OSError as error:
        raise NodeStateFileError(f"{path}: cannot be written ({error.strerror}); make it writable") from None


def load_node_state(node: SimulatedNode, path: Path) -> None:
    """Brings a node with MIG off to what the file says; raises StateFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MOST + 1)
    except OSError as error:
        raise NodeStateFileError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    try:
        problem = (
            f"has more than {_BYTES_MOST} bytes"
            if len(content) > _BYTES_MOST
            else _restore_node(node, json.loads(content))
        )
    except (ValueError, TypeError, LookupError, DriverRefused, RecursionError) as error:
        problem = f"describes no such node ({error})"
    if problem:
        raise NodeStateFileError(f"{path}: {problem}; correct it, or remove it to begin with the fleet file again")


def _restore_node(node: SimulatedNode, document: dict[str, Any]) -> str:
    """Brings the node there; returns what is wrong with the document, or nothing."""
    if document["schema"] != _SCHEMA:
        return f"is no state of schema {_SCHEMA}"
    if document["node"] != node.spec.node_name or len(document["gpus"]) != len(node.devices):
        return f"is of another node than {node.spec.node_name}"
    rights = str(document.get("rights", "root"))
    if rights not in _RIGHTS:
        return f"has rights {rights!r}, and there are {', '.join(_RIGHTS)}"
    node.faults.set_rights(_RIGHTS[rights])
    for gpu, fields in zip(node.devices, document["gpus"], strict=True):
        if fields["product"] != gpu.product.key:
            return f"GPU {gpu.identity.index} is no {gpu.product.key} there"
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
