"""What several clusters say of themselves, added up: their totals and their energy.

Pure: no I/O, no clock. Must not know how clusters are asked.
"""

from collections.abc import Iterable, Mapping, Sequence

from eelgrid_protos.messages import (
    EnergyGroup,
    EnergySpent,
    EnergyWork,
    ModelSummary,
    QueryEnergyRequest,
    QueryEnergyResponse,
    ReasonCount,
    Summary,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST

_ADDED_FIELDS = (
    "gpus", "gpus_lost", "nodes_ready", "nodes_lost", "allocated_gpu_milli", "cpu_milli", "allocated_cpu_milli", "pending",
    "placed", "cancelled", "refused", "modelled_power_w", "measured_power_w", "measured_gpus", "samples_received",
    "samples_lost", "decisions",
)  # fmt: skip
_REASONS_MOST, _MODELS_MOST = 64, 1000
# As the contract has it: rows without a number asked for, and rows at all.
_ROWS_DEFAULT, _ROWS_MOST = 1000, 10_000
_DAMAGED_MOST = 64


def add_summaries(summaries: Iterable[Summary], *, now_ns: int) -> Summary:
    """Adds the totals of clusters; quantiles of decisions are those of the slowest."""
    found = list(summaries)
    reasons: dict[str, int] = {}
    models: dict[str, ModelSummary] = {}
    for one in found:
        for reason in one.pending_reasons:
            reasons[reason.reason] = reasons.get(reason.reason, 0) + reason.workloads
        for model in one.models:
            known = models.get(model.model)
            models[model.model] = (
                model
                if known is None
                else ModelSummary(
                    model=model.model,
                    gpus=known.gpus + model.gpus,
                    allocated_gpu_milli=known.allocated_gpu_milli + model.allocated_gpu_milli,
                    measured_power_w=known.measured_power_w + model.measured_power_w,
                )
            )
    most = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:_REASONS_MOST]
    waiting = [one.oldest_pending_ns for one in found if one.oldest_pending_ns]
    return Summary(
        oldest_pending_ns=min(waiting, default=0),
        time_ns=now_ns,
        pending_reasons=tuple(ReasonCount(reason=reason, workloads=count) for reason, count in most),
        decision_p50_s=max((one.decision_p50_s for one in found), default=0.0),
        decision_p99_s=max((one.decision_p99_s for one in found), default=0.0),
        models=tuple(models[name] for name in sorted(models)[:_MODELS_MOST]),
        **{name: sum(getattr(one, name) for one in found) for name in _ADDED_FIELDS},
    )


def _add_spent(parts: Iterable[EnergySpent]) -> EnergySpent:
    found = list(parts)
    return EnergySpent(
        bare_idle_mj=sum(one.bare_idle_mj for one in found),
        context_idle_mj=sum(one.context_idle_mj for one in found),
        active_mj=sum(one.active_mj for one in found),
        cost=sum(one.cost for one in found),
        carbon_g=sum(one.carbon_g for one in found),
    )


def _measure(spent: EnergySpent) -> int:
    return spent.bare_idle_mj + spent.context_idle_mj + spent.active_mj


def _add_work(parts: Sequence[EnergyWork]) -> EnergyWork:
    """Adds work of one unit; the joules of a unit are those of all work, if each cluster knows its own."""
    amount = sum(one.amount for one in parts)
    joules = [one.amount * one.energy_per_unit_j for one in parts if one.energy_per_unit_j is not None]
    is_known = len(joules) == len(parts) and amount > 0
    return EnergyWork(
        unit=parts[0].unit,
        amount=amount,
        counted_s=sum(one.counted_s for one in parts),
        missed_s=sum(one.missed_s for one in parts),
        energy_per_unit_j=sum(joules) / amount if is_known else None,
    )


def _add_groups(groups: Sequence[EnergyGroup]) -> EnergyGroup:
    """Adds the rows of several clusters that have the same values."""
    work: dict[str, list[EnergyWork]] = {}
    for one in groups:
        for done in one.work:
            work.setdefault(done.unit, []).append(done)
    return EnergyGroup(
        values=groups[0].values,
        spent=_add_spent(one.spent for one in groups),
        work=tuple(_add_work(work[unit]) for unit in sorted(work)[:8]),
    )


def add_energy(
    request: QueryEnergyRequest, answers: Mapping[str, QueryEnergyResponse], silent: Mapping[str, str]
) -> QueryEnergyResponse:
    """Adds the energy of clusters, by name, in one currency; at least one. `silent` says why others are missing.

    Rows with the same values are one; the largest remain, as many as were asked for.
    """
    found = [answers[name] for name in sorted(answers)]
    rows: dict[tuple[str, ...], list[EnergyGroup]] = {}
    for answer in found:
        for group in answer.groups:
            rows.setdefault(tuple(group.values), []).append(group)
    groups = sorted((_add_groups(one) for one in rows.values()), key=lambda one: (-_measure(one.spent), one.values))
    most = min(request.rows_most or _ROWS_DEFAULT, _ROWS_MOST)
    problems = [f"{name} is missing: {why}" for name, why in sorted(silent.items())]
    problems += [f"{name}: {one}" for name in sorted(answers) for one in answers[name].damaged]
    return QueryEnergyResponse(
        begin_ns=min(one.begin_ns for one in found),
        end_ns=max(one.end_ns for one in found),
        currency=found[0].currency,
        groups=tuple(groups[:most]),
        left_out=_add_spent([*(one.left_out for one in found), *(one.spent for one in groups[most:])]),
        # Of rows that clusters left out nobody knows which are the same.
        left_out_groups=sum(one.left_out_groups for one in found) + len(groups[most:]),
        unallocated=_add_spent(one.unallocated for one in found),
        unattributed=_add_spent(one.unattributed for one in found),
        measured_mj=sum(one.measured_mj for one in found),
        uncertainty_mj=sum(one.uncertainty_mj for one in found),
        uncounted_s=sum(one.uncounted_s for one in found),
        damaged=tuple(one[:SENTENCE_LETTERS_MOST] for one in problems[:_DAMAGED_MOST]),
    )
