"""Overviews with something of everything."""

from eelgrid_protos.messages import (
    AttentionItem,
    AttentionKind,
    AttentionSeverity,
    CapacityOverview,
    Consumer,
    Overview,
    PowerOverview,
    PromiseOverview,
    TodayEnergy,
    WaitingReason,
)

MINUTE_NS = 60 * 10**9


def busy_overview(now_ns, *, workload_id, currency="EUR"):
    """A lost GPU and a lost node, a broken promise, waiting work, and two who use most of it."""
    priced = bool(currency)
    return Overview(
        time_ns=now_ns,
        power=PowerOverview(
            measured_w=8_312.4, measured_gpus=90, gpus=96, budget_w=10_000.0, claimed_w=9_000.0, over_w=0.0
        ),
        today=TodayEnergy(
            begin_ns=now_ns - 600 * MINUTE_NS,
            end_ns=now_ns,
            energy_j=3.6e6 * 83.25,
            idle_j=3.6e6 * 12.5,
            cost=20.5 if priced else None,
            idle_cost=3.1 if priced else None,
            currency=currency,
        ),
        capacity=CapacityOverview(
            gpus=96,
            held_milli=52_000,
            free_milli=36_500,
            gpus_idle=3,
            gpus_lost=1,
            gpus_unreachable=8,
            nodes=12,
            nodes_lost=1,
        ),
        waiting=(WaitingReason(reason="gpu_count", workloads=1), WaitingReason(reason="budget", workloads=2)),
        promises=PromiseOverview(kept=4, broken=1),
        attention=_attention(now_ns, workload_id),
        attention_total=4,
        consumers=_consumers(is_priced=priced),
        consumers_total=2,
        workloads_waiting=3,
        workloads_placed=12,
    )


def _attention(now_ns, workload_id):
    severity, kind = AttentionSeverity, AttentionKind
    return (
        AttentionItem(
            severity=severity.CRITICAL,
            kind=kind.LOST_GPU,
            subject="node-0000/2",
            message="It does not respond; 1 workload held it.",
            since_ns=now_ns - 14 * MINUTE_NS,
            command="eelctl describe node-0000/2",
        ),
        AttentionItem(
            severity=severity.CRITICAL,
            kind=kind.BROKEN_PROMISE,
            subject=workload_id,
            message="chat answers in 0.62 s, and its objective is 0.5 s.",
            command="eelctl promises",
        ),
        AttentionItem(
            severity=severity.WARNING,
            kind=kind.LOST_NODE,
            subject="node-0001",
            message="Its agent is away.",
            since_ns=now_ns - 300 * MINUTE_NS,
            command="eelctl describe node-0001",
        ),
        AttentionItem(
            severity=severity.INFO,
            kind=kind.LONG_WAIT,
            subject="gpu_count",
            message="1 workload waits for gpu_count, the longest for 3 h.",
            since_ns=now_ns - 180 * MINUTE_NS,
            command="eelctl queue --reason gpu_count",
        ),
    )


def _consumers(*, is_priced):
    return (
        Consumer(
            namespace="research",
            user="alice",
            workloads=3,
            held_milli=40_000,
            power_w=6_100.0,
            energy_j=3.6e6 * 60.0,
            cost=15.0 if is_priced else None,
            gpus_idle=2,
        ),
        Consumer(
            namespace="serving",
            user="",
            workloads=1,
            held_milli=12_500,
            power_w=940.0,
            energy_j=3.6e6 * 10.75,
            cost=2.25 if is_priced else None,
            gpus_idle=1,
        ),
    )
