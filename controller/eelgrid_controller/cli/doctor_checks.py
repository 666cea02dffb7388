"""What eelctl doctor thinks of a controller and its fleet: from answers of its API to findings.

Owns the thresholds and the remedies. Must not call anything. Every check takes
what one call answered; a call that failed is the shell's to tell as skipped.
"""

import re
from collections.abc import Iterable, Sequence

from eelgrid_controller.cli.doctor_finding import Finding, failed, good, named, skipped, spread, warned
from eelgrid_controller.spelling import energy_text, watts_text
from eelgrid_protos.messages import (
    AccessLevel,
    ApplyStatus,
    BudgetStatus,
    EnforcementMode,
    JobStatus,
    ListPromisesResponse,
    Node,
    NodeState,
    PlanStatus,
    Policy,
    QueryEnergyResponse,
    ServiceStatus,
    Summary,
)

__all__ = [
    "agents", "ahead", "budgets", "enforcement", "fresh", "gpus", "layouts", "ledger", "plans", "promises", "reach", "rejected",
    "samples", "versions",
]  # fmt: skip

# A batch may be late by a turn of both sides; three are a pattern.
_STALE_BATCHES, _STALE_LEAST_S = 3.0, 30.0
_NEAR = 0.95
_LOST_SHARE = 0.001
_UNSTEERED = "unsteered"
_VERSION = re.compile(r"(\d+)\.(\d+)")


def agents(summary: Summary) -> Finding:
    """Agents that are connected, of the nodes that are known."""
    known = summary.nodes_ready + summary.nodes_lost
    if not known:
        remedy = "start eelgrid-agent on the nodes with --controller HOST:PORT; see their logs where they run"
        return warned("agents", "no agent ever connected", remedy)
    said = f"{summary.nodes_ready:,} of {spread(known, 'known node')} connected"
    if summary.nodes_lost:
        remedy = "`eelctl nodes --state lost` names them; look at eelgrid-agent there (journalctl, kubectl logs)"
        return (warned if summary.nodes_ready else failed)("agents", said, remedy)
    return good("agents", said)


def samples(summary: Summary) -> Finding:
    """Ticks that never came."""
    lost, came = summary.samples_lost, summary.samples_received
    said = f"{came:,} received, {lost:,} lost"
    if lost and lost > _LOST_SHARE * (came + lost):
        remedy = "raise --spool-ticks of the agents, or see why they were away: `eelctl nodes -o wide` tells where"
        return warned("samples", said, remedy)
    return good("samples", said)


def fresh(nodes: Sequence[Node], send_interval_s: float) -> Finding:
    """Nodes that are connected and send nothing."""
    most_s = max(_STALE_LEAST_S, _STALE_BATCHES * send_interval_s)
    ready = [node for node in nodes if node.state is NodeState.READY]
    if not ready:
        return skipped("telemetry", "no node is ready", "see the check of agents")
    ages = {node.inventory.node_name: node.sample_age_s for node in ready if node.inventory.gpus}
    silent = [name for name, age_s in ages.items() if age_s is None or age_s > most_s]
    if silent:
        what = f"no sample in {most_s:.0f} s from {spread(len(silent), 'node')} ({named(silent)})"
        return failed("telemetry", what, "see the agents' logs: a driver that hangs, or a clock that is off")
    oldest_s = max((age_s for age_s in ages.values() if age_s is not None), default=0.0)
    return good("telemetry", f"the oldest newest sample is {oldest_s:.0f} s old")


def versions(nodes: Sequence[Node], controller: str, eelctl: str) -> tuple[Finding, ...]:
    """Whether the three speak of the same release; `controller` is empty where nobody told."""
    findings = []
    if not controller:
        remedy = "name its metrics with --metrics HOST:PORT"
        findings.append(skipped("version, controller", f"eelctl is {eelctl}; the controller's is not known", remedy))
    elif _release(controller) == _release(eelctl):
        findings.append(
            good("version, controller", controller if controller == eelctl else f"{controller}, eelctl {eelctl}")
        )
    else:
        remedy = "install eelctl and the controller of one release"
        findings.append(warned("version, controller", f"{controller}, but eelctl is {eelctl}", remedy))
    measure = controller or eelctl
    others: dict[str, list[str]] = {}
    for node in nodes:
        if _release(node.inventory.agent_version) != _release(measure):
            others.setdefault(node.inventory.agent_version or "unknown", []).append(node.inventory.node_name)
    if others:
        said = "; ".join(f"{version} on {named(names)}" for version, names in sorted(others.items()))
        remedy = f"bring these agents to {measure}: the controller first, then its agents"
        findings.append(warned("version, agents", f"{said}, not {measure}", remedy))
    elif nodes:
        findings.append(good("version, agents", f"{spread(len(nodes), 'agent')} of {measure}"))
    return tuple(findings)


def _release(version: str) -> tuple[str, ...]:
    found = _VERSION.match(version)
    return found.groups() if found else (version,)


def ahead(nodes: Sequence[Node]) -> Finding:
    """Nodes that hold more than the journal knows: it has lost entries."""
    these = [node for node in nodes if node.ahead_epoch is not None]
    if not these:
        return good("journal, nodes", "no node holds more than the journal knows")
    names = [node.inventory.node_name for node in these]
    lost = sorted({key for node in these for key in node.unknown_workload_ids})
    what = f"{spread(len(these), 'node')} ({named(names)}) hold a plan that the journal does not know"
    return failed(
        "journal, nodes",
        what + (f", with {named(lost)}" if lost else ""),
        "the journal lost entries, so nothing new is placed there: see what runs there, then `eelctl reconcile NODE`",
    )


def gpus(nodes: Sequence[Node]) -> tuple[Finding, ...]:
    """Devices that are lost, and those that take no new work."""
    every = [(node.inventory.node_name, gpu) for node in nodes for gpu in node.inventory.gpus]
    lost = [f"{name}/{gpu.index}" for name, gpu in every if gpu.lost]
    held = [f"{name}/{gpu.index} ({gpu.cordon})" for name, gpu in every if gpu.cordon and not gpu.lost]
    findings = []
    if lost:
        remedy = "look for XIDs in `dmesg` there; drain the node, reset the GPU or boot the machine"
        findings.append(failed("GPUs lost", f"{spread(len(lost), 'GPU')} answer nothing: {named(lost)}", remedy))
    if held:
        remedy = "see the node's log for what befell them; they return when they have behaved for a while"
        findings.append(warned("GPUs cordoned", f"{spread(len(held), 'GPU')} take no new work: {named(held)}", remedy))
    return tuple(findings) or (good("GPUs", f"{spread(len(every), 'GPU')}, none lost, none cordoned"),)


def layouts(nodes: Sequence[Node]) -> Finding:
    """MIG modes that wait for a reset."""
    stuck = [f"{n.inventory.node_name}/{gpu.index}" for n in nodes for gpu in n.inventory.gpus if gpu.mig_pending]
    if stuck:
        remedy = "drain these nodes and reset the GPUs, or boot the machines"
        return warned("MIG mode", f"{spread(len(stuck), 'GPU')} wait for a reset: {named(stuck)}", remedy)
    return good("MIG mode", "no change waits for a reset")


def enforcement(nodes: Iterable[Node], policy: Policy) -> Finding:
    """Whether agents of enforced pools may change what the controller wants changed."""
    enforced = {pool.pool for pool in policy.pools if pool.mode is EnforcementMode.ENFORCE}
    if not enforced:
        return good("enforcement", "no pool is enforced: nothing on any GPU is changed")
    of_these = [n for n in nodes if n.inventory.pool in enforced and n.inventory.gpus]
    unable = [
        n.inventory.node_name for n in of_these if n.inventory.access < AccessLevel.ROOT and not n.inventory.simulated
    ]
    if unable:
        what = f"{spread(len(unable), 'agent')} of enforced pools may not set limits: {named(unable)}"
        return failed("enforcement", what, "run these agents with CAP_SYS_ADMIN (chart: agent.enforce), or observe")
    return good(
        "enforcement", f"{spread(len(of_these), 'node')} in {spread(len(enforced), 'enforced pool')} may be changed"
    )


def reach(nodes: Iterable[Node], policy: Policy) -> Finding:
    """Whether power limits reach the GPUs of enforced pools: a part that tells no range of limits cannot be lowered."""
    enforced = {pool.pool for pool in policy.pools if pool.mode is EnforcementMode.ENFORCE}
    every = [(n.inventory.node_name, gpu) for n in nodes if n.inventory.pool in enforced for gpu in n.inventory.gpus]
    silent = [f"{name}/{gpu.index}" for name, gpu in every if not gpu.lost and gpu.power_limit_min_w is None]
    if silent:
        what = f"{spread(len(silent), 'GPU')} of enforced pools tell no power limits that they take: {named(silent)}"
        return warned("power limits", what, "no plan and no budget can lower these: count them as they draw")
    return good("power limits", f"{spread(len(every), 'GPU')} of enforced pools can be limited")


def plans(found: Sequence[PlanStatus]) -> tuple[Finding, ...]:
    """Plans that nodes refused, could not carry out, or did not answer."""
    refused, broken, waiting = [], [], []
    for status in found:
        plan, applied, name = status.plan, status.applied, status.plan.node_name
        results = applied.results if applied else ()
        rules = {result.rule for result in results if result.status is ApplyStatus.REFUSED and result.rule}
        kinds = {result.status for result in results} | ({applied.status} if applied else set())
        if ApplyStatus.FAILED in kinds:
            broken.append(name)
        elif ApplyStatus.REFUSED in kinds:
            refused.append(f"{name} ({', '.join(sorted(rules)) or 'no rule named'})")
        if plan.epoch and (applied is None or applied.epoch < plan.epoch):
            waiting.append(name)
    findings = []
    see = "`eelctl plan NODE` shows the items; docs/reference/agent.md lists the rules"
    if broken:
        findings.append(
            failed("plans failed", f"{spread(len(broken), 'node')} could not do their plan: {named(broken)}", see)
        )
    if refused:
        findings.append(warned("plans refused", f"{spread(len(refused), 'node')} refused: {named(refused)}", see))
    if waiting:
        remedy = "run this again in some seconds; a node that stays here is away or its agent hangs"
        findings.append(warned("plans unanswered", f"{spread(len(waiting), 'node')}: {named(waiting)}", remedy))
    return tuple(findings) or (good("plans", f"{spread(len(found), 'plan')}, all answered as asked"),)


def budgets(found: Sequence[BudgetStatus], drawn_w: float, measured_gpus: int, gpus_known: int) -> tuple[Finding, ...]:
    """Power budgets that are over or nearly so; what is drawn is known of the cluster's."""
    if not found:
        return (good("budgets", "no power budget is set"),)
    findings = []
    for status in found:
        budget = status.budget
        name = f"{budget.scope.name.lower()} {budget.name}".strip()
        check = f"budget, {name}"
        is_whole = budget.scope.name == "CLUSTER" and measured_gpus == gpus_known
        if is_whole and drawn_w > budget.limit_w:
            what = f"{watts_text(drawn_w)} are drawn of {watts_text(budget.limit_w)}"
            findings.append(failed(check, what, "see `eelctl promises`: enforce more pools, drain nodes, or raise it"))
        elif status.shortfall_w > 0:
            what = f"{watts_text(status.shortfall_w)} of what was promised have no room in {watts_text(budget.limit_w)}"
            findings.append(warned(check, what, "see `eelctl promises`: promise less, or raise it (eelctl policy set)"))
        elif status.claimed_w > _NEAR * budget.limit_w:
            what = f"{watts_text(status.claimed_w)} claimed of {watts_text(budget.limit_w)}"
            findings.append(warned(check, what, "nothing yet; new work will wait for watts"))
    return tuple(findings) or (good("budgets", f"{spread(len(found), 'budget')}, none near its limit"),)


def promises(found: ListPromisesResponse) -> tuple[Finding, ...]:
    """Promises that nobody can keep, for nobody can watch or steer."""
    every: list[ServiceStatus | JobStatus] = [*found.services, *found.jobs]
    if not every:
        return (good("promises", "nothing is promised"),)
    unsteered = [one for one in every if one.phase == _UNSTEERED]
    late = [one.name or one.workload_id for one in found.services
            if one.live_s is not None and one.objective_s and one.live_s > one.objective_s]  # fmt: skip
    findings = []
    if unsteered:
        names = named(f"{one.name or one.workload_id} ({one.reason.partition(';')[0]})" for one in unsteered)
        remedy = "measure a profile (`eelctl profile`) or correct the metrics' address; `eelctl promises` says which"
        findings.append(warned("promises", f"{spread(len(unsteered), 'promise')} nobody steers: {names}", remedy))
    if late:
        what = f"{spread(len(late), 'service')} slower than promised: {named(late)}"
        findings.append(
            warned("latency", what, "`eelctl promises` tells what is done for them, or what stands against it")
        )
    return tuple(findings) or (good("promises", f"{spread(len(every), 'promise')}, all steered, none late"),)


def ledger(found: QueryEnergyResponse, measured_gpus: int) -> Finding:
    """Whether joules of the last hours came; an answer covers this hour and the one before."""
    said = f"{energy_text(found.measured_mj / 1000.0)} in this hour and the one before"
    if not found.measured_mj and measured_gpus:
        what = "GPUs are measured, but the ledger has no joule of this hour and the one before"
        return warned(
            "ledger", what, "wait a minute after a start; then see `ledger` in the controller's log and its disk"
        )
    if not found.measured_mj:
        return skipped("ledger", "no GPU is measured", "see the checks of agents and telemetry")
    return good("ledger", said)


def rejected(summary: Summary) -> Finding:
    """Work that waits, and why."""
    if not summary.pending:
        return good("queue", "nothing waits")
    most = max(summary.pending_reasons, key=lambda reason: reason.workloads, default=None)
    why = f", most of it for: {most.reason}" if most else ""
    return good("queue", f"{spread(summary.pending, 'workload')} wait{why}")
