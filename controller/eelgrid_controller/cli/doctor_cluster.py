"""Checks of `eelctl doctor` on answers of the controller, the local agent and the metrics page.

Each check takes one answer and returns findings with remedies; it makes no calls. The command reports a failed call as
skipped. A series that is missing from the metrics page is None: an older controller has fewer of them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eelgrid_controller.cli.doctor_machine import (
    Finding,
    join_names,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from eelgrid_controller.formatting import count_noun, format_energy, format_power
from eelgrid_controller.state.attention import (
    BudgetProblem,
    GpuProblem,
    find_budget_problem,
    find_gpu_problems,
    find_plan_problems,
    is_late,
    is_unanswered,
    is_uncontrolled,
    stale_after_s,
)
from eelgrid_protos.messages import (
    AccessLevel,
    BudgetStatus,
    EnforcementMode,
    GetNodePlanResponse,
    GetSamplesResponse,
    Gpu,
    Inventory,
    JobStatus,
    ListPromisesResponse,
    Node,
    NodeState,
    PlanStatus,
    Policy,
    QueryEnergyResponse,
    ServiceStatus,
    Summary,
    resolve_pool,
)

_LOST_SHARE = 0.001
_VERSION = re.compile(r"(\d+)\.(\d+)")


def check_agents(summary: Summary) -> Finding:
    """Checks how many of the known nodes have a connected agent."""
    known = summary.nodes_ready + summary.nodes_lost
    if not known:
        remedy = "start eelgrid-agent on the nodes with --controller HOST:PORT; if it runs, see its log"
        return report_warning("agents", "no agent has ever connected", remedy)
    said = f"{summary.nodes_ready:,} of {count_noun(known, 'known node')} connected"
    if summary.nodes_lost:
        remedy = "`eelctl nodes --state lost` lists the others; check eelgrid-agent there (journalctl, kubectl logs)"
        return (report_warning if summary.nodes_ready else report_failure)("agents", said, remedy)
    return report_ok("agents", said)


def check_samples(summary: Summary) -> Finding:
    """Checks how many samples were lost."""
    lost, came = summary.samples_lost, summary.samples_received
    said = f"{came:,} received, {lost:,} lost"
    if lost and lost > _LOST_SHARE * (came + lost):
        remedy = "raise --spool-ticks of the agents, or find out why they were disconnected: `eelctl nodes -o wide` shows which"
        return report_warning("samples", said, remedy)
    return report_ok("samples", said)


def check_freshness(nodes: Sequence[Node], send_interval_s: float) -> Finding:
    """Checks for nodes that are connected but send no samples."""
    most_s = stale_after_s(send_interval_s)
    ready = [node for node in nodes if node.state is NodeState.READY]
    if not ready:
        return report_skipped("telemetry", "no node is ready", "see the check of agents")
    ages = {node.inventory.node_name: node.sample_age_s for node in ready if node.inventory.gpus}
    silent = [name for name, age_s in ages.items() if age_s is None or age_s > most_s]
    if silent:
        what = f"no sample in {most_s:.0f} s from {count_noun(len(silent), 'node')} ({join_names(silent)})"
        return report_failure("telemetry", what, "see the agents' logs: a GPU driver may hang, or a clock may be wrong")
    oldest_s = max((age_s for age_s in ages.values() if age_s is not None), default=0.0)
    return report_ok("telemetry", f"the latest sample of every node is at most {oldest_s:.0f} s old")


def check_versions(nodes: Sequence[Node], controller: str, eelctl: str) -> tuple[Finding, ...]:
    """Checks that eelctl, controller and agents are of the same release; `controller` is empty if unknown."""
    findings = []
    if not controller:
        remedy = "give the address of its metrics with --metrics HOST:PORT"
        findings.append(
            report_skipped("version, controller", f"eelctl is {eelctl}; the controller's version is not known", remedy)
        )
    elif _release(controller) == _release(eelctl):
        findings.append(
            report_ok("version, controller", controller if controller == eelctl else f"{controller}, eelctl {eelctl}")
        )
    else:
        remedy = "install eelctl and the controller of the same release"
        findings.append(report_warning("version, controller", f"{controller}, but eelctl is {eelctl}", remedy))
    measure = controller or eelctl
    others: dict[str, list[str]] = {}
    for node in nodes:
        if _release(node.inventory.agent_version) != _release(measure):
            others.setdefault(node.inventory.agent_version or "unknown", []).append(node.inventory.node_name)
    if others:
        said = "; ".join(f"{version} on {join_names(names)}" for version, names in sorted(others.items()))
        remedy = f"upgrade to {measure}: first the controller, then its agents"
        findings.append(report_warning("version, agents", f"{said}, not {measure}", remedy))
    elif nodes:
        findings.append(report_ok("version, agents", f"{count_noun(len(nodes), 'agent')} of {measure}"))
    return tuple(findings)


def _release(version: str) -> tuple[str, ...]:
    found = _VERSION.match(version)
    return found.groups() if found else (version,)


def check_journal_loss(nodes: Sequence[Node]) -> Finding:
    """Checks for nodes that hold more than the journal knows, which means that it has lost entries."""
    these = [node for node in nodes if node.ahead_epoch is not None]
    if not these:
        return report_ok("journal, nodes", "no node holds more than the journal knows")
    names = [node.inventory.node_name for node in these]
    lost = sorted({key for node in these for key in node.unknown_workload_ids})
    what = f"{count_noun(len(these), 'node')} ({join_names(names)}) hold a plan that the journal does not know"
    return report_failure(
        "journal, nodes",
        what + (f", with {join_names(lost)}" if lost else ""),
        "the journal lost entries, so no new work is placed there: check what runs there, then `eelctl reconcile NODE`",
    )


def _list_gpus_with(problem: GpuProblem, nodes: Sequence[Node]) -> list[tuple[str, Gpu]]:
    """Lists the GPUs that have a problem, each with its place, as the overview does."""
    return [
        (f"{node.inventory.node_name}/{gpu.index}", gpu)
        for node in nodes
        for gpu in node.inventory.gpus
        if problem in find_gpu_problems(gpu, node.state, is_lost=gpu.lost)
    ]


def check_gpus(nodes: Sequence[Node]) -> tuple[Finding, ...]:
    """Checks for GPUs that are lost or cordoned by their agents, and for nodes and GPUs that operators cordoned."""
    count = sum(len(node.inventory.gpus) for node in nodes)
    lost = [place for place, _ in _list_gpus_with(GpuProblem.LOST, nodes)]
    held = [f"{place} ({gpu.cordon})" for place, gpu in _list_gpus_with(GpuProblem.CORDONED, nodes)]
    findings = []
    if lost:
        remedy = "look for XIDs in `dmesg` there; `eelctl drain NODE`, reset the GPU or reboot the machine"
        findings.append(
            report_failure(
                "GPUs lost", f"{count_noun(len(lost), 'GPU does', 'GPUs do')} not respond: {join_names(lost)}", remedy
            )
        )
    if held:
        remedy = "see the node's log for the cause; they take work again after a while without errors"
        findings.append(
            report_warning(
                "GPUs cordoned", f"{count_noun(len(held), 'GPU')} take no new work: {join_names(held)}", remedy
            )
        )
    closed = [
        node.inventory.node_name + (f"/{indexes.get(one.gpu_uuid, one.gpu_uuid)}" if one.gpu_uuid else "")
        for node in nodes
        for indexes in [{gpu.uuid: gpu.index for gpu in node.inventory.gpus}]
        for one in node.cordons
    ]
    if closed:
        remedy = "`eelctl describe node NODE` says who did so and why; `eelctl uncordon` them when they may work again"
        findings.append(report_warning("cordons", f"operators closed {join_names(closed)} to new work", remedy))
    return tuple(findings) or (report_ok("GPUs", f"{count_noun(count, 'GPU')}, none lost, none cordoned"),)


def check_leases(check: str, inventories: Iterable[Inventory]) -> Finding:
    """Checks for leases of other engines of whose owners it is not known whether they still exist."""
    leases = [(node.node_name, gpu, one) for node in inventories for gpu in node.gpus for one in gpu.leases]
    unknown = [found for found in leases if found[2].unknown]
    if not unknown:
        return report_ok(check, f"{count_noun(len(leases), 'lease')} of other engines, all owners known to exist")
    names = join_names(f"{name}/{gpu.index} ({one.engine} {one.owner}: {one.unknown})" for name, gpu, one in unknown)
    name, _, first = unknown[0]
    release = f"eelgrid-agent lease release --engine {first.engine} --owner OWNER"
    remedy = f"nothing else starts there: if the owner has ended, run `{release}` on {name}; else remove the reason"
    return report_warning(
        check, f"{count_noun(len(unknown), 'lease')} stay, since an owner may be gone: {names}", remedy
    )


def check_layouts(nodes: Sequence[Node]) -> Finding:
    """Checks for MIG mode changes that wait for a reset."""
    stuck = [place for place, _ in _list_gpus_with(GpuProblem.MIG_PENDING, nodes)]
    if stuck:
        remedy = "drain these nodes and reset the GPUs, or reboot the machines"
        return report_warning(
            "MIG mode", f"{count_noun(len(stuck), 'GPU waits', 'GPUs wait')} for a reset: {join_names(stuck)}", remedy
        )
    return report_ok("MIG mode", "no change waits for a reset")


def check_enforcement(nodes: Iterable[Node], policy: Policy) -> Finding:
    """Checks that agents of enforced pools have the rights to change settings."""
    enforced = {pool.pool for pool in policy.pools if pool.mode is EnforcementMode.ENFORCE}
    if not enforced:
        return report_ok("enforcement", "no pool is enforced: no GPU setting is changed")
    of_these = [n for n in nodes if resolve_pool(n.inventory.pool) in enforced and n.inventory.gpus]
    unable = [
        n.inventory.node_name for n in of_these if n.inventory.access < AccessLevel.ROOT and not n.inventory.simulated
    ]
    if unable:
        what = f"{count_noun(len(unable), 'agent')} of enforced pools may not set limits: {join_names(unable)}"
        return report_failure(
            "enforcement",
            what,
            "run these agents with CAP_SYS_ADMIN (chart: agent.enforce), or set the pools to observe",
        )
    return report_ok(
        "enforcement",
        f"{count_noun(len(of_these), 'node')} in {count_noun(len(enforced), 'enforced pool')} may be changed",
    )


def check_limit_reach(nodes: Iterable[Node], policy: Policy) -> Finding:
    """Checks that GPUs of enforced pools accept power limits: one that reports no range cannot be lowered."""
    enforced = {pool.pool for pool in policy.pools if pool.mode is EnforcementMode.ENFORCE}
    every = [
        (n.inventory.node_name, gpu)
        for n in nodes
        if resolve_pool(n.inventory.pool) in enforced
        for gpu in n.inventory.gpus
    ]
    silent = [f"{name}/{gpu.index}" for name, gpu in every if not gpu.lost and gpu.power_limit_min_w is None]
    if silent:
        what = (
            f"{count_noun(len(silent), 'GPU')} of enforced pools without a range of power limits: {join_names(silent)}"
        )
        return report_warning("power limits", what, "no plan or budget can lower these: budget for what they draw")
    return report_ok("power limits", f"{count_noun(len(every), 'GPU')} of enforced pools can be limited")


def check_plans(found: Sequence[PlanStatus]) -> tuple[Finding, ...]:
    """Checks for plans that nodes refused, failed to apply, or did not answer."""
    refused, broken, waiting = [], [], []
    for status in found:
        plan, applied, name = status.plan, status.applied, status.plan.node_name
        problems = find_plan_problems(applied)
        if problems.has_failed:
            broken.append(name)
        elif problems.has_refused:
            refused.append(f"{name} ({', '.join(problems.rules) or 'no rule named'})")
        if is_unanswered(plan, applied):
            waiting.append(name)
    findings = []
    see = "`eelctl plan NODE` shows the items; docs/reference/agent.md lists the rules"
    if broken:
        findings.append(
            report_failure(
                "plans failed",
                f"{count_noun(len(broken), 'node')} failed to apply their plan: {join_names(broken)}",
                see,
            )
        )
    if refused:
        findings.append(
            report_warning("plans refused", f"{count_noun(len(refused), 'node')} refused: {join_names(refused)}", see)
        )
    if waiting:
        remedy = "run this again in a few seconds; a node that stays listed is disconnected, or its agent hangs"
        findings.append(
            report_warning("plans unanswered", f"{count_noun(len(waiting), 'node')}: {join_names(waiting)}", remedy)
        )
    return tuple(findings) or (report_ok("plans", f"{count_noun(len(found), 'plan')}, all applied"),)


def check_budgets(found: Sequence[BudgetStatus]) -> tuple[Finding, ...]:
    """Checks for power budgets that are exceeded or nearly so, by the figures of `eelctl promises`."""
    if not found:
        return (report_ok("budgets", "no power budget is set"),)
    findings = []
    for status in found:
        budget = status.budget
        check = f"budget, {f'{budget.scope.name.lower()} {budget.name}'.strip()}"
        most = format_power(budget.limit_w)
        unread = status.gpus - status.measured_gpus
        problem = find_budget_problem(status)
        if problem is BudgetProblem.OVER:
            what = f"{format_power(status.measured_w)} measured of {most}: {format_power(status.over_w)} over"
            what += f", and {count_noun(unread, 'GPU')} not read" if unread else ""
            remedy = "see `eelctl promises`: enforce more pools, drain nodes, or raise the budget"
            findings.append(report_failure(check, what, remedy))
        elif problem is BudgetProblem.SHORT:
            what = f"{format_power(status.shortfall_w)} more than {most} is needed for objectives and lost nodes"
            remedy = "see `eelctl promises`: relax objectives, or raise the budget (eelctl policy set)"
            findings.append(report_warning(check, what, remedy))
        elif problem is BudgetProblem.NEARLY_CLAIMED:
            what = f"{format_power(status.claimed_w)} claimed of {most}"
            findings.append(report_warning(check, what, "nothing yet; new work will wait for power"))
        elif problem is BudgetProblem.NEARLY_DRAWN:
            what = f"{format_power(status.measured_w)} measured of {most}"
            findings.append(report_warning(check, what, "nothing yet; see `eelctl promises` for what is claimed"))
    return tuple(findings) or (report_ok("budgets", f"{count_noun(len(found), 'budget')}, none near its limit"),)


def check_promises(found: ListPromisesResponse) -> tuple[Finding, ...]:
    """Checks for objectives that cannot be controlled or are missed."""
    every: list[ServiceStatus | JobStatus] = [*found.services, *found.jobs]
    if not every:
        return (report_ok("promises", "nothing has an objective"),)
    unsteered = [one for one in every if is_uncontrolled(one)]
    late = [one.name or one.workload_id for one in found.services if is_late(one)]
    findings = []
    if unsteered:
        names = join_names(f"{one.name or one.workload_id} ({one.reason.partition(';')[0]})" for one in unsteered)
        remedy = (
            "measure a profile (`eelctl profile`) or correct the address of the metrics; `eelctl promises` shows which"
        )
        findings.append(
            report_warning("promises", f"{count_noun(len(unsteered), 'promise')} not controlled: {names}", remedy)
        )
    if late:
        what = f"{count_noun(len(late), 'service')} slower than their objective: {join_names(late)}"
        findings.append(
            report_warning("latency", what, "`eelctl promises` shows what is done for them, or what prevents it")
        )
    return tuple(findings) or (
        report_ok("promises", f"{count_noun(len(every), 'promise')}, all controlled, none late"),
    )


def check_ledger(found: QueryEnergyResponse, measured_gpus: int) -> Finding:
    """Checks that energy of the last hours was recorded; an answer covers this hour and the one before."""
    said = f"{format_energy(found.measured_mj / 1000.0)} in this hour and the one before"
    if not found.measured_mj and measured_gpus:
        what = "GPUs are measured, but the ledger has no energy for this hour and the one before"
        return report_warning(
            "ledger", what, "wait a minute after a start; then check `ledger` in the controller's log, and its disk"
        )
    if not found.measured_mj:
        return report_skipped("ledger", "no GPU is measured", "see the checks of agents and telemetry")
    return report_ok("ledger", said)


def check_waiting_work(summary: Summary) -> Finding:
    """Reports how much work is pending, and the most frequent reason."""
    if not summary.pending:
        return report_ok("queue", "nothing is pending")
    most = max(summary.pending_reasons, key=lambda reason: reason.workloads, default=None)
    why = f", most of it for: {most.reason}" if most else ""
    return report_ok("queue", f"{count_noun(summary.pending, 'workload waits', 'workloads wait')}{why}")


_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: [0-9]+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_LAG_S = 5.0
_LEDGER_S = 900.0
_SILENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class MetricsAnswer:
    """Values of a metrics page by name and labels."""

    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the value of one series; None if it is missing."""
        return self.series.get((name, frozenset(labels.items())))

    def all_of(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Returns all series of a name, by labels."""
        return {labels: value for (found, labels), value in self.series.items() if found == name}

    @property
    def version(self) -> str:
        """Version of the controller; empty if the page lacks it."""
        for labels in self.all_of("eelgrid_controller_info"):
            return dict(labels).get("version", "")
        return ""

    @property
    def is_ours(self) -> bool:
        """Whether this is the metrics page of a controller."""
        return self.value("eelgrid_state_revision") is not None


def parse_metrics(text: str) -> MetricsAnswer:
    """Parses Prometheus' text format; skips lines that do not match it."""
    series = {}
    for line in text.splitlines():
        match = _SERIES.fullmatch(line) if line and line[0] != "#" else None
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        series[match[1], frozenset(_LABEL.findall(match[2] or ""))] = value
    return MetricsAnswer(series)


def check_metrics(page: MetricsAnswer) -> tuple[Finding, ...]:
    """Checks everything that the metrics page shows."""
    return (
        check_journal(page),
        *check_changed_settings(page),
        check_control_loop(page),
        *check_ledger_age(page),
        *check_clock_jumps(page),
        *check_kubernetes(page),
    )


def check_journal(page: MetricsAnswer) -> Finding:
    """Checks that the controller can write its journal to disk."""
    writable, lag_s = page.value("eelgrid_journal_writable"), page.value("eelgrid_journal_lag_seconds")
    if writable is None:
        return report_skipped(
            "journal", "the metrics page does not show it", "give the address of the controller's metrics"
        )
    if not writable:
        remedy = "check the disk of its --data (df, dmesg): it accepts nothing until it can write again"
        return report_failure("journal", "cannot be written", remedy)
    if lag_s is not None and lag_s > _LAG_S:
        return report_warning(
            "journal", f"commands wait {lag_s:.0f} s for the disk", "check the disk of its --data (iostat)"
        )
    return report_ok("journal", "can be written")


def check_changed_settings(page: MetricsAnswer) -> tuple[Finding, ...]:
    """Checks for limits and clocks that another program changed since the controller started."""
    drifts = page.value("eelgrid_agent_events_total", kind="setting_drift") or 0.0
    given_up = page.value("eelgrid_agent_events_total", kind="enforcement_suspended") or 0.0
    findings = []
    if given_up:
        what = f"agents gave up {count_noun(int(given_up), 'time')} on a setting that another program keeps changing"
        remedy = "find what else sets limits there (nvidia-smi in a cron job, DCGM, a tuning daemon) and stop it"
        findings.append(report_failure("caps suspended", what, remedy))
    if drifts:
        what = f"another program changed what an agent had set, {count_noun(int(drifts), 'time')} since the controller started"
        remedy = "the agent set it again; the node's log names the GPU (event=setting_drift): find what else sets it"
        findings.append(report_warning("caps drifted", what, remedy))
    return tuple(findings) or (report_ok("caps", "no setting drifted since the controller started"),)


def check_control_loop(page: MetricsAnswer) -> Finding:
    """Checks that the objectives loop runs without errors."""
    cycles, failures = page.value("eelgrid_objectives_cycles_total"), page.value("eelgrid_objectives_failures_total")
    faults = page.value("eelgrid_objectives_faults_total") or 0.0
    if cycles is None:
        return report_skipped(
            "objectives", "the metrics page does not show it", "upgrade the controller to this release"
        )
    if failures:
        what = f"{count_noun(int(failures), 'cycle')} of {int(cycles):,} failed"
        return report_failure("objectives", what, "its log has the reason (objectives); please report it, with the log")
    if faults:
        what = f"{count_noun(int(faults), 'workload')} were skipped because of an error"
        return report_warning("objectives", what, "its log names them (objectives)")
    return report_ok("objectives", f"{count_noun(int(cycles), 'cycle')}, none failed")


def check_ledger_age(page: MetricsAnswer) -> tuple[Finding, ...]:
    """Checks that the ledger keeps up; returns nothing if the page does not show it."""
    age_s = page.value("eelgrid_ledger_newest_window_age_seconds")
    failures = page.value("eelgrid_ledger_failures_total") or 0.0
    damaged = page.value("eelgrid_ledger_damaged_parts") or 0.0
    if damaged:
        what = f"{count_noun(int(damaged), 'damaged part')}, by checksum, omitted from answers"
        remedy = "its log and `eelctl energy` name them; check the disk, and restore a backup (EelgridLedgerFailing)"
        return (report_failure("ledger, damage", what, remedy),)
    refused = page.value("eelgrid_ledger_windows_total", result="refused") or 0.0
    if refused and not failures:
        what = f"{count_noun(int(refused), 'window')} from agents were refused: their GPUs cannot have drawn that much"
        return (report_warning("ledger, refused", what, "the controller's log names the nodes (ledger=refused)"),)
    if failures:
        what = f"could not write {count_noun(int(failures), 'time')}"
        remedy = "check the disk of its --data; agents keep their windows until they are accepted"
        return (report_warning("ledger, writing", what, remedy),)
    if age_s is None:
        return ()
    if age_s > _LEDGER_S:
        what = f"the newest window ended {age_s / 60.0:.0f} minutes ago"
        remedy = "check that agents are connected and their clocks right; they send what they kept when they reconnect"
        return (report_warning("ledger, age", what, remedy),)
    return (report_ok("ledger, age", f"the newest window ended {age_s:.0f} s ago"),)


def check_clock_jumps(page: MetricsAnswer) -> tuple[Finding, ...]:
    """Checks for jumps of the controller's clock; returns nothing if the page does not show it."""
    jumps = page.value("eelgrid_clock_jumps_total")
    if jumps is None:
        return ()
    if not jumps:
        return (report_ok("clock, jumps", "none since the controller started"),)
    last_s = page.value("eelgrid_clock_jump_seconds") or 0.0
    what = f"{count_noun(int(jumps), 'jump')} since the controller started, the last by {last_s:+,.1f} s"
    return (report_warning("clock, jumps", what, "synchronise its machine by NTP (timedatectl set-ntp true)"),)


def check_kubernetes(page: MetricsAnswer) -> tuple[Finding, ...]:
    """Checks leadership and watches of Kubernetes; returns nothing without Kubernetes."""
    leading = page.value("eelgrid_kubernetes_leading")
    if leading is None:
        return ()
    findings = [report_ok("kubernetes", "leads" if leading else "standby: another controller holds the Lease")]
    silence = {
        dict(labels).get("kind", "?"): value
        for labels, value in page.all_of("eelgrid_kubernetes_silence_seconds").items()
    }
    mute = sorted(kind for kind, age_s in silence.items() if age_s > _SILENCE_S)
    if mute:
        what = f"the API server has said nothing of {', '.join(mute)} for {max(silence.values()):.0f} s"
        findings.append(
            report_failure(
                "kubernetes, watches",
                what,
                "check that it answers, and that the controller's account may list and watch them",
            )
        )
    stuck = page.value("eelgrid_kubernetes_pods_unschedulable") or 0.0
    if stuck:
        what = f"kube-scheduler cannot bind {count_noun(int(stuck), 'pinned pod')} to their nodes"
        remedy = "`kubectl describe pod` names the taint, quota or volume; resolve it, or let the pod go elsewhere"
        findings.append(report_warning("kubernetes, pods", what, remedy))
    return tuple(findings)


_STALE_S = 10.0
_LEASE_WARN_S = 5.0


def check_inventory(found: Inventory) -> tuple[Finding, ...]:
    """Checks the agent's version, its rights and its GPUs."""
    name = found.node_name + (" (simulated)" if found.simulated else "")
    findings = [report_ok("agent", f"{name}: version {found.agent_version}, {count_noun(len(found.gpus), 'GPU')}")]
    may = {
        AccessLevel.ROOT: "limits, clocks and MIG",
        AccessLevel.MIG_CONFIG: "MIG instances",
        AccessLevel.MIG_MONITOR: "nothing; it can read MIG instances",
        AccessLevel.READ_ONLY: "nothing; it can read",
    }.get(found.access, "nothing that it reports")
    findings.append(report_ok("agent, rights", f"may change {may}"))
    silent = [str(gpu.index) for gpu in found.gpus if not gpu.lost and gpu.power_limit_min_w is None]
    if silent:
        what = f"GPU {join_names(silent)} reports no range of power limits"
        remedy = "no plan or --power-budget can lower it; see `nvidia-smi -q -d POWER`"
        findings.append(report_warning("agent, power limits", what, remedy))
    lost = [str(gpu.index) for gpu in found.gpus if gpu.lost]
    if lost:
        remedy = "look for XIDs in `dmesg`; reset the GPU or reboot the machine"
        findings.append(report_failure("agent, GPUs", f"GPU {join_names(lost)} does not respond", remedy))
    return tuple(findings)


def check_newest_sample(found: GetSamplesResponse) -> Finding:
    """Checks that the agent reads its sensors."""
    if found.age_s > _STALE_S or found.samples is None or not found.samples.time_ns:
        what = f"the latest sample is {found.age_s:,.0f} s old"
        return report_failure("agent, sampling", what, "a call into the driver hangs: see the agent's log, and `dmesg`")
    return report_ok("agent, sampling", f"the latest sample is {found.age_s:.1f} s old")


def check_lease(found: GetNodePlanResponse) -> Finding:
    """Checks that the lease of the plan in force is being renewed."""
    if found.plan is None or not found.plan.epoch:
        return report_warning(
            "agent, plan", "no plan received", "check that the agent reaches its controller (its log: event=connected)"
        )
    if found.lease_left_s < _LEASE_WARN_S:
        what = f"the lease of plan {found.plan.epoch} ends in {found.lease_left_s:.0f} s or has ended"
        return report_warning(
            "agent, plan", what, "the controller is unreachable, so the agent restores what it changed; see its log"
        )
    return report_ok("agent, plan", f"plan {found.plan.epoch}, lease ends in {found.lease_left_s:.0f} s")
