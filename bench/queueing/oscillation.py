"""KAI's two-queue oscillation: two queues of weight 1 that each always have a job of all 16 GPUs, without end.

Replays DATA/kai_kueue's `two_queue_oscillation` on a core, with a minute as a cycle: a node of 16 GPUs, two queues
without quota below one parent, and jobs that never end. KAI expects that use alternates and that each queue gets one half
over time; the file has no other figure. Played with reclaim by past use at three horizons and, to compare, by present fair
share, by which the first job keeps the GPUs for ever. Only the half-life of KAI's file is played, not its window.

Theory: queueing.past_use. Both queues hold the GPUs in turns of T = H + h log2(1 / (2 - 2^(H/h))) with the horizon H and
the half-life h, so their shares differ by one turn at the most. The charge of a minute at each admission shortens a turn by
about half a cycle.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.queueing.summary import SetResult, SummaryRow
from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, WorkloadEvicted
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    Gpu,
    Inventory,
    PreemptionReclaim,
    Queue,
    QueuePreemption,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadSpec,
)

_NS = 1_000_000_000
_CYCLE_S = 60
_HALF_LIVES = 10
_SHARE_ERROR_MOST = 0.01
_JOBS = 3
# In parts of the half-life; 1/16 is the default.
HORIZONS = (1.0 / 64.0, 1.0 / 16.0, 1.0 / 8.0)
LEAVES = ("team-a", "team-b")


@dataclass(frozen=True)
class Oscillation:
    """The share of the first queue after each cycle, since the begin, and the cycles at which the GPUs changed queues."""

    shares: tuple[float, ...]
    changes: tuple[int, ...]
    preemptions: int


def compute_turn(half_life: float, horizon: float) -> float:
    """Returns how long each of two queues of equal weight holds a whole pool, in the unit of both arguments."""
    return horizon + half_life * math.log2(1.0 / (2.0 - 2.0 ** (horizon / half_life)))


def build_core(gpus: int, half_life: float, rules: QueuePreemption, job_gpus: int) -> Core:
    """Builds a core with one node, and two queues in which jobs wait; times are in cycles."""
    core = Core(ClusterState(), catalogue.load_catalogue())
    devices = tuple(Gpu(uuid=f"GPU-{n}", index=n, model="H100", product="NVIDIA H100") for n in range(gpus))
    core.register_node(Inventory(node_name="a", cpu_milli=10**6, memory_bytes=2**40, gpus=devices), now_ns=1)
    queues = (Queue(name="department", preemption=rules), *(Queue(name=name, parent="department") for name in LEAVES))
    policy = replace(core.state.policy, queues=queues, queue_half_life_s=half_life * _CYCLE_S)
    core.update_policy(policy, now_ns=1)
    request = ResourceRequest(cpu_milli=1000, gpu_count=job_gpus, gpu_milli=1000)
    for number in range(_JOBS * gpus // job_gpus):
        for name in LEAVES:
            key = f"{name}-{number}"
            spec = WorkloadSpec(name=key, queue=name, kind=WorkloadKind.BATCH_JOB, request=request)
            core.submit(SubmitWorkloadRequest(spec=spec, workload_id=key), now_ns=2)
    return core


def play(core: Core, cycles: int) -> Oscillation:
    """Lets time pass in which no job ends."""
    held, before, preemptions = [0, 0], (-1, -1), 0
    shares, changes = list[float](), list[int]()
    for cycle in range(1, cycles + 1):
        now_ns = cycle * _CYCLE_S * _NS
        events: list[Event] = list(core.continue_drains(now_ns=now_ns).events)
        while core.has_backlog:
            events += core.retry(now_ns=now_ns).events
        preemptions += sum(isinstance(event, WorkloadEvicted) for event in events)
        holds = _count_gpus(core)
        if holds != before:
            changes.append(cycle)
        before = holds
        held = [one + now for one, now in zip(held, holds, strict=True)]
        shares.append(held[0] / max(1, sum(held)))
    return Oscillation(tuple(shares), tuple(changes[1:]), preemptions)


def _count_gpus(core: Core) -> tuple[int, int]:
    charges = core.state.queue_usage.charges.values()
    first, second = (sum(one.amounts["gpu"] for one in charges if one.queue == name) // 1000 for name in LEAVES)
    return first, second


def _list_policies(half_life: float) -> Sequence[tuple[str, QueuePreemption]]:
    past = QueuePreemption(reclaim=PreemptionReclaim.PAST_USE, min_runtime_s=_CYCLE_S)
    return [
        ("reclaim by fair share", QueuePreemption(reclaim=PreemptionReclaim.FAIR_SHARE)),
        *(
            (f"reclaim by past use, horizon h/{1.0 / part:g}", replace(past, horizon_s=part * half_life * _CYCLE_S))
            for part in HORIZONS
        ),
    ]


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set, which takes some seconds, quick or not."""
    del quick
    load = json.loads((folder / "kai_kueue.json").read_text(encoding="utf-8"))["kai"]["two_queue_oscillation"]
    half_life, gpus = float(load["half_life"]), int(load["nodes"] * load["gpus_per_node"])
    cycles = int(_HALF_LIVES * half_life)
    rows, targets, curves = list[SummaryRow](), list[tuple[str, bool]](), {}
    for policy, rules in _list_policies(half_life):
        one = play(build_core(gpus, half_life, rules, int(load["job_gpus"])), cycles)
        share, is_past = one.shares[-1], rules.reclaim is PreemptionReclaim.PAST_USE
        curves[policy] = one.shares
        for name, part in zip(LEAVES, (share, 1.0 - share), strict=True):
            rows.append(SummaryRow("kai oscillation", policy, f"share_of_{name}", part, 0.5 if is_past else None, 0.5))
        rows.append(SummaryRow("kai oscillation", policy, "preemptions", float(one.preemptions)))
        if not is_past:
            continue
        turn = (one.changes[-1] - one.changes[0]) / (len(one.changes) - 1)
        rows.append(SummaryRow("kai oscillation", policy, "mean_turn_cycles", turn))
        in_theory = compute_turn(half_life, rules.horizon_s / _CYCLE_S)
        rows.append(SummaryRow("kai oscillation", policy, "turn_by_closed_form", in_theory))
        what = (
            f"{policy}: shares {share:.3f} and {1 - share:.3f} within 0.5 +- {_SHARE_ERROR_MOST} over {cycles} cycles"
        )
        targets.append((what, abs(share - 0.5) <= _SHARE_ERROR_MOST))
    return SetResult(tuple(rows), tuple(targets), curves)


def draw(path: Path, result: SetResult) -> None:
    """Draws the share of one queue over time."""
    from bench.plotting import draw_figure  # a second to import

    with draw_figure(path, size=(9, 5)) as panels:
        for policy, shares in result.curves.items():
            panels[0].plot(range(1, len(shares) + 1), shares, label=policy)
        panels[0].axhline(0.5, color="0.5", linestyle="--")
        panels[0].set_xlabel("cycle of a minute; the half-life is 128 cycles")
        panels[0].set_title("share of one of two queues of weight 1, since the begin")
        panels[0].legend()
