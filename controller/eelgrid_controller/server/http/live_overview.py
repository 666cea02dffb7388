"""The overview (GetOverview) as the live page reads it: the same figures, with times in milliseconds."""

from typing import Any

from eelgrid_protos.messages import AttentionItem, Consumer, Overview, TodayEnergy

_NS_PER_MS = 1_000_000


def overview_details(found: Overview) -> dict[str, Any]:
    """Returns the overview as JSON values; what is unknown is null."""
    power, capacity, promises = found.power, found.capacity, found.promises
    return {
        "at_ms": found.time_ns // _NS_PER_MS,
        "revision": found.revision,
        "power": {
            "measured_w": power.measured_w,
            "measured_gpus": power.measured_gpus,
            "gpus": power.gpus,
            "budget_w": power.budget_w,
            "claimed_w": power.claimed_w,
            "shortfall_w": power.shortfall_w,
            "over_w": power.over_w,
        },
        "today": None if found.today is None else _today(found.today),
        "capacity": {
            "gpus": capacity.gpus,
            "held_milli": capacity.held_milli,
            "free_milli": capacity.free_milli,
            "gpus_idle": capacity.gpus_idle,
            "gpus_lost": capacity.gpus_lost,
            "gpus_cordoned": capacity.gpus_cordoned,
            "gpus_unreachable": capacity.gpus_unreachable,
            "nodes": capacity.nodes,
            "nodes_lost": capacity.nodes_lost,
            "nodes_cordoned": capacity.nodes_cordoned,
        },
        "waiting": [
            {
                "reason": one.reason,
                "workloads": one.workloads,
                "milli": one.gpu_milli,
                "since_ms": one.oldest_since_ns // _NS_PER_MS,
                "example": one.example_workload_id,
                # The sentence, without the constraint's name before it.
                "words": one.example_reason.partition(": ")[2] or one.reason or "not tried yet",
                "remedy": one.remedy,
            }
            for one in found.waiting
        ],
        "promises": {
            "kept": promises.kept,
            "at_risk": promises.at_risk,
            "broken": promises.broken,
            "unknown": promises.unknown,
        },
        "attention": [_attention(item) for item in found.attention],
        "attention_in_all": found.attention_total,
        "consumers": [_consumer(one) for one in found.consumers],
        "consumers_in_all": found.consumers_total,
        "consumers_left_out_milli": found.consumers_left_out_milli,
        "waits": found.workloads_waiting,
        "placed": found.workloads_placed,
    }


def _today(found: TodayEnergy) -> dict[str, Any]:
    return {
        "begin_ms": found.begin_ns // _NS_PER_MS,
        "end_ms": found.end_ns // _NS_PER_MS,
        "energy_j": found.energy_j,
        "idle_j": found.idle_j,
        "unallocated_j": found.unallocated_j,
        "held_idle_j": found.held_idle_j,
        "cost": found.cost,
        "idle_cost": found.idle_cost,
        "currency": found.currency,
        "carbon_g": found.carbon_g,
    }


def _attention(item: AttentionItem) -> dict[str, Any]:
    return {
        "severity": item.severity.name.lower(),
        "kind": item.kind.name.lower(),
        "subject": item.subject,
        "message": item.message,
        "since_ms": item.since_ns // _NS_PER_MS or None,
        "command": item.command,
    }


def _consumer(one: Consumer) -> dict[str, Any]:
    return {
        "namespace": one.namespace,
        "user": one.user,
        "workloads": one.workloads,
        "milli": one.held_milli,
        "power_w": one.power_w,
        "energy_j": one.energy_j,
        "cost": one.cost,
        "gpus_idle": one.gpus_idle,
    }
