"""What eelctl doctor thinks of the agent on this machine: from answers of its API to findings.

Owns the thresholds and the remedies. Must not call anything.
"""

from eelgrid_controller.cli.doctor_finding import Finding, failed, good, named, spread, warned
from eelgrid_protos.messages import AccessLevel, GetNodePlanResponse, GetSamplesResponse, Inventory

__all__ = ["inventory", "lease", "newest"]

_STALE_S = 10.0
_LEASE_WARN_S = 5.0


def inventory(found: Inventory) -> tuple[Finding, ...]:
    """What the agent is, what it may do, and the devices that it lost."""
    name = found.node_name + (" (simulated)" if found.simulated else "")
    findings = [good("agent", f"{name}: version {found.agent_version}, {spread(len(found.gpus), 'GPU')}")]
    may = {
        AccessLevel.ROOT: "limits, clocks and MIG",
        AccessLevel.MIG_CONFIG: "MIG instances",
        AccessLevel.MIG_MONITOR: "nothing; it sees MIG instances",
        AccessLevel.READ_ONLY: "nothing; it reads",
    }.get(found.access, "nothing that it tells of")
    findings.append(good("agent, rights", f"may change {may}"))
    silent = [str(gpu.index) for gpu in found.gpus if not gpu.lost and gpu.power_limit_min_w is None]
    if silent:
        what = f"GPU {named(silent)} tells no power limits that it takes"
        remedy = "no plan and no --power-budget can lower it; see `nvidia-smi -q -d POWER`"
        findings.append(warned("agent, power limits", what, remedy))
    lost = [str(gpu.index) for gpu in found.gpus if gpu.lost]
    if lost:
        remedy = "look for XIDs in `dmesg`; reset the GPU or boot the machine"
        findings.append(failed("agent, GPUs", f"GPU {named(lost)} answers nothing", remedy))
    return tuple(findings)


def newest(found: GetSamplesResponse) -> Finding:
    """Whether the agent reads its sensors."""
    if found.age_s > _STALE_S or found.samples is None or not found.samples.time_ns:
        what = f"the newest sample is {found.age_s:,.0f} s old"
        return failed("agent, sampling", what, "a call into the driver hangs: see the agent's log, and `dmesg`")
    return good("agent, sampling", f"the newest sample is {found.age_s:.1f} s old")


def lease(found: GetNodePlanResponse) -> Finding:
    """Whether the plan in force is being renewed."""
    if found.plan is None or not found.plan.epoch:
        return warned(
            "agent, plan", "no plan came", "see that the agent reaches its controller (its log: event=connected)"
        )
    if found.lease_left_s < _LEASE_WARN_S:
        what = f"the lease of plan {found.plan.epoch} ends in {found.lease_left_s:.0f} s or has ended"
        return warned("agent, plan", what, "the controller is away: what the agent changed is put back; see its log")
    return good("agent, plan", f"plan {found.plan.epoch}, leased for {found.lease_left_s:.0f} s more")
