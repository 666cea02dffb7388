"""Details that a viewer opens: a GPU, a workload, a search, objectives and measured points."""

from typing import Any

from eelgrid_controller.server.http.live_model.live_view import FleetCells
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.measurements import JOB_PROFILE_PREFIX, MeasuredPoints
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.telemetry import GpuReadings
from eelgrid_protos.messages import Explanation, Gpu, ListPromisesResponse, ServiceStatus, Workload, WorkloadPhase

HOLDERS_MOST = 256
REPLICAS_MOST = 256
FOUND_MOST = 200
SEARCHED_MOST = 100_000
PROFILES_MOST = 200
MODELS_MOST = 100
POINTS_MOST = 500
PROMISES_MOST = 500


def gpu_details(state: ClusterState, record: NodeRecord, gpu: Gpu, readings: GpuReadings, age_s: float | None) -> Any:
    """One GPU: what it is, what it reads, who holds it."""
    holders: list[dict[str, Any]] = []
    for item in record.assignments.values():
        if gpu.uuid in item.gpu_uuids and len(holders) < HOLDERS_MOST:
            part = item.gpu_instance
            workload = state.workloads[item.workload_id]
            holders.append(
                {
                    "workload_id": item.workload_id,
                    "name": workload.spec.name,
                    "replica": item.replica,
                    "milli": item.gpu_milli,
                    "slice": f"{part.profile or 'whole'} at {part.start}" if part else "",
                }
            )
    return {
        "node": record.inventory.node_name,
        "node_state": record.state.name.lower(),
        "pool": record.inventory.pool,
        "topology": list(record.inventory.topology),
        "index": gpu.index,
        "uuid": gpu.uuid,
        "model": gpu.model,
        "product": gpu.product,
        "memory_bytes": gpu.memory_bytes,
        "limit_default_w": gpu.power_limit_default_w,
        "limit_min_w": gpu.power_limit_min_w,
        "limit_max_w": gpu.power_limit_max_w,
        "cordon": gpu.cordon,
        "lost": gpu.uuid in record.lost_gpus,
        "mig": gpu.mig_enabled,
        "planner_keeps": record.is_partition_managed(gpu),
        "held_milli": record.gpu_milli.get(gpu.uuid, 0),
        "power_w": readings.power_w,
        "energy_j": readings.energy_j,
        "utilization": readings.utilization_ratio,
        "memory_used_bytes": readings.memory_used_bytes,
        "temperature_c": readings.temperature_c,
        "age_s": age_s,
        "holders": holders,
        "slices": [{"profile": one.profile, "start": one.start, "size": one.size} for one in gpu.gpu_instances],
        "wanted": [
            {"profile": one.profile, "start": one.start}
            for one in (record.layouts[gpu.uuid].instances if gpu.uuid in record.layouts else ())
        ],
    }


def workload_details(explanation: Explanation, fleet: FleetCells) -> Any:
    """One workload: what was asked, where it stands, and why, with each cost in watts."""
    workload = explanation.workload
    spec = workload.spec
    return {
        **_row(workload),
        "user": spec.user,
        "queue": spec.queue,
        "priority": spec.priority,
        "labels": dict(spec.labels),
        "cpu_milli": spec.request.cpu_milli,
        "memory_bytes": spec.request.memory_bytes,
        "gpu_models": list(spec.request.gpu_models),
        "submitted_ms": workload.submitted_ns // 1_000_000,
        "placed_ms": workload.placed_ns // 1_000_000 or None,
        "ended_ms": workload.ended_ns // 1_000_000 or None,
        "power_limit_w": workload.power_limit_w,
        "decision": workload.revision,
        "promise": _promise(workload),
        "placements": [
            {
                "replica": one.replica,
                "node": one.node_name,
                "gpus": list(one.gpu_indexes),
                "cells": [cell for uuid in one.gpu_uuids if (cell := fleet.cell(one.node_name, uuid)) is not None],
                "slice": one.gpu_instance.profile if one.gpu_instance else "",
            }
            for one in workload.placements[:REPLICAS_MOST]
        ],
        "placements_in_all": len(workload.placements),
        "remedy": explanation.remedy,
        "constraint": explanation.constraint,
        "explained": [
            {
                "replica": one.replica,
                "feasible_nodes": one.feasible_nodes,
                "removals": [[removal.constraint, removal.nodes] for removal in one.removals],
                "candidates": [
                    {
                        "node": candidate.node_name,
                        "gpus": list(candidate.gpu_indexes),
                        "cost_w": candidate.cost_w,
                        "terms": [[term.name, term.cost_w] for term in candidate.terms],
                    }
                    for candidate in one.candidates
                ],
            }
            for one in explanation.replicas[:REPLICAS_MOST]
        ],
    }


def _promise(workload: Workload) -> str:
    """Whether it was promised something, in words."""
    if workload.spec.service is not None:
        return f"a service of profile {workload.spec.service.profile or 'its own'}"
    if workload.spec.training is not None:
        return f"a training job of profile {workload.spec.training.profile or 'its own'}"
    return ""


def _row(workload: Workload) -> dict[str, Any]:
    spec = workload.spec
    return {
        "id": workload.workload_id,
        "name": spec.name,
        "namespace": spec.namespace,
        "kind": spec.kind.name.lower(),
        "phase": workload.phase.name.lower(),
        "replicas": spec.replicas,
        "gpus": spec.request.gpu_count,
        "milli": spec.request.gpu_milli,
        "reason": workload.reason,
    }


def search_workloads(state: ClusterState, text: str) -> Any:
    """Live workloads whose id, name or namespace has this text, the newest first."""
    text = text.strip().lower()
    found: list[dict[str, Any]] = []
    left_out = False
    for looked, workload in enumerate(reversed(state.workloads.values())):
        if len(found) >= FOUND_MOST or looked >= SEARCHED_MOST:
            left_out = True
            break
        spec = workload.spec
        if workload.phase is not WorkloadPhase.CANCELLED and (
            not text or text in f"{workload.workload_id} {spec.name} {spec.namespace}".lower()
        ):
            found.append(_row(workload))
    return {"rows": found, "left_out": left_out}


def list_objectives(found: ListPromisesResponse) -> Any:
    """How services and jobs keep what they were promised, the latest first."""

    def urgency(one: ServiceStatus) -> float:
        return -(one.live_s / one.objective_s) if one.live_s is not None and one.objective_s else 0.0

    services = sorted(found.services, key=urgency)
    return {
        "services": [
            {
                "id": one.workload_id,
                "name": one.name,
                "phase": one.phase,
                "serving": one.replicas_serving,
                "wanted": one.replicas_wanted,
                "arrived_hz": one.arrived_hz,
                "live_s": one.live_s,
                "objective_s": one.objective_s,
                "reason": one.reason,
                "is_advice": one.is_advice,
            }
            for one in services[:PROMISES_MOST]
        ],
        "jobs": [
            {
                "id": one.workload_id,
                "name": one.name,
                "phase": one.phase,
                "limit_w": one.power_limit_w,
                "slowdown": one.slowdown,
                "saving": one.saving,
                "reason": one.reason,
                "is_advice": one.is_advice,
            }
            for one in found.jobs[:PROMISES_MOST]
        ],
        "left_out": sum(max(0, len(rows) - PROMISES_MOST) for rows in (found.services, found.jobs)),
    }


def list_points(points: MeasuredPoints, profile: str, model: str = "") -> Any:
    """Measured points of one profile on one GPU model, and which profiles and models there are."""
    names = [name for name in points if not name.startswith(JOB_PROFILE_PREFIX)]
    names += [name for name in points if name.startswith(JOB_PROFILE_PREFIX)]
    chosen = profile if profile in points else (names[0] if names else "")
    kept = points[chosen] if chosen else ()
    models = list(dict.fromkeys(one.configuration.gpu_model for one in kept))
    on = model if model in models else (models[0] if models else "")
    here = [one for one in kept if one.configuration.gpu_model == on]
    rows = [
        {
            "model": one.configuration.gpu_model,
            "mig": one.configuration.mig_profile,
            "gpus": one.configuration.gpus,
            "batch": one.configuration.batch,
            "limit_w": one.configuration.power_limit_w,
            "rate_hz": one.throughput_hz,
            "power_w": one.power_w,
            "source": one.source,
            "latency_s": one.latency_s.get(0.95) or one.latency_s.get(0.99),
        }
        for one in here[:POINTS_MOST]
    ]
    return {
        "profiles": names[:PROFILES_MOST],
        "profile": chosen,
        "models": models[:MODELS_MOST],
        "model": on,
        "points": rows,
        "points_in_all": len(here),
    }
