"""The invariants, checked from outside after every step or every few.

1  Nothing is allocated twice or beyond capacity.
2  What was answered as accepted exists after any crash, exactly once, and moves only by an event.
3  The journal, replayed on a fresh state, gives the live state.
4  Plan epochs never fall and no agent applies an older plan; once faults stop, every agent is
   connected and holds exactly what the controller planned.
5  Every tick that an agent took is received exactly once, or held, or counted.
6  Absent readings never become numbers, stale ones never count as fresh, energy never falls.
7  The same seed gives the same trace (timeline.py and the test).
8  On a network that keeps order, the controller never finds that a real agent breaks the contract.
9  After the journal lost entries nothing is placed on a GPU that an agent holds for work that was lost, until an
   operator gave that up; entries that are gone below the mark are told at the start, by their numbers.
10 Everything that anybody may ask for can be answered, whatever another said; no call stays open.

Most of 4, 5, 6, 8 and 9 is checked where it happens, in ledger.py and ticks.py; here
is what takes a look at everything at once.
"""

import math

from eelgrid_agent.simulation.gpu import SimHealth
from eelgrid_controller.clock import RecentLatencies
from eelgrid_controller.placement.power import PowerAdmission
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.codec import encode_message
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    GetPolicyResponse,
    GetSummaryResponse,
    ListGpusResponse,
    ListNodesResponse,
    ListPlansResponse,
    ListWorkloadsResponse,
    NodePlan,
    NodeState,
    Reading,
    WorkloadPhase,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE
from tests.sim.agent import Agent
from tests.sim.broken import Broken, demand
from tests.sim.controller import Controller
from tests.sim.ledger import Ledger, as_begun, held_of
from tests.sim.life import Life
from tests.sim.poison import ROGUE
from tests.state_invariants import InvariantBroken, check_invariants

__all__ = ["check_end", "check_freshness", "check_served", "check_state"]


def check_state(controller: Controller, agents: list[Agent], ledger: Ledger) -> None:
    """1, 2, 3, 9 and the controller's half of 4, at a moment when all is on disk."""
    life = controller.life
    if life is None or not life.is_settled:
        return
    state = life.core.state
    demand(
        3,
        state.revision == ledger.shadow.revision,
        f"live revision {state.revision} beside {ledger.shadow.revision} committed entries",
    )
    _check_capacity(state)
    _check_power(life)
    _check_promises(state, ledger)
    if ledger.rollbacks:
        _check_exclusive(state, agents, ledger)
    for name in state.nodes:
        plan = life.core.node_plan(name)
        ledger.epoch_seen(name, plan.epoch)
        wanted = {
            (key, placement.replica, placement.gpu_uuids)
            for key, placements in ledger.placed.items()
            for placement in placements
            if placement.node_name == name
        }
        planned = {(item.workload_id, item.replica, item.gpu_uuids) for item in plan.assignments}
        demand(4, planned == wanted, f"the plan of {name} is not what was placed on it")
    demand(3, state.digest() == ledger.shadow.digest(), f"replay of {state.revision} entries is not the live state")


def _check_power(life: Life) -> None:
    """1: what nodes may draw, and what budgets leave, is as if it were counted anew; no limits are set here."""
    state, names = life.core.state, list(life.core.state.nodes)
    kept, anew = life.core._chooser.allowance.survey(names), PowerAdmission(state, load_catalogue()).survey(names)
    if kept is not None and anew is not None:
        demand(1, kept.left_mw == anew.left_mw, f"budgets leave {anew.left_mw}, counted as {kept.left_mw}")
        demand(1, kept.shares == anew.shares, f"nodes draw {anew.shares}, counted as {kept.shares}")


def _check_exclusive(state: ClusterState, agents: list[Agent], ledger: Ledger) -> None:
    """9: what an agent holds and the journal lost shares its GPUs with nothing that was placed since, but what it holds, too."""
    for agent in agents:
        record = state.nodes.get(agent.name)
        unknown = ledger.unknown(agent.held)
        if record is None or not unknown:
            continue
        taken = {uuid for _, _, uuids in unknown for uuid in uuids}
        held = set(map(held_of, agent.held))
        for item in record.assignments.values():
            key = held_of(item)
            is_new = ledger.history.get(key, 0) > ledger.left and key not in held
            both = taken.intersection(item.gpu_uuids) if is_new else ()
            demand(9, not both, f"{agent.name}: {key} was placed beside {unknown}, which runs there")


def check_served(controller: Controller) -> None:
    """10: whatever was said, everybody's questions have answers that the contract lets through."""
    life = controller.life
    if life is None or not life.is_settled:
        return
    clock, state = life.clock, life.core.state
    views = ResourceViews(
        telemetry=life.telemetry, decisions=RecentLatencies(16), now_ns=clock.wall_ns, monotonic_s=clock.monotonic_s
    )
    answers: list[object] = [
        GetSummaryResponse(summary=views.summary(life.core)),
        GetPolicyResponse(policy=state.policy),
    ]
    for name, record in state.nodes.items():
        answers.append(ListNodesResponse(nodes=(views.node(record),)))
        answers.append(
            ListGpusResponse(gpus=tuple(views.gpu(record, gpu, state.workloads) for gpu in record.inventory.gpus))
        )
        answers.append(ListPlansResponse(plans=(views.plan(life.core, name),)))
    answers.extend(ListWorkloadsResponse(workloads=(workload,)) for workload in state.workloads.values())
    for answer in answers:
        try:
            encode_message(answer)
        except ContractError as error:
            raise Broken(10, f"{type(answer).__name__} cannot be said: {error}") from error


def _check_capacity(state: ClusterState) -> None:
    try:
        check_invariants(state)
    except InvariantBroken as error:
        raise Broken(1, str(error)) from error
    held: dict[str, int] = {}
    cpu: dict[str, int] = {}
    memory: dict[str, int] = {}
    for workload in state.workloads.values():
        request = workload.spec.request
        if workload.phase is not WorkloadPhase.PLACED:
            continue
        for placement in workload.placements:
            name = placement.node_name
            cpu[name] = cpu.get(name, 0) + request.cpu_milli
            memory[name] = memory.get(name, 0) + request.memory_bytes
            demand(1, len(placement.gpu_uuids) == request.gpu_count, f"{workload.workload_id}: not the GPUs asked for")
            for uuid in placement.gpu_uuids:
                held[uuid] = held.get(uuid, 0) + request.gpu_milli
    for uuid, milli in held.items():
        demand(1, milli <= GPU_MILLI_WHOLE, f"GPU {uuid} is promised at {milli} milli")
    for name, record in state.nodes.items():
        if name.startswith(ROGUE):
            continue  # it shrinks as it likes
        # No simulated machine loses CPU or memory, so nothing may be beyond them.
        demand(1, cpu.get(name, 0) <= record.inventory.cpu_milli, f"{name}: CPU promised beyond what is there")
        demand(1, memory.get(name, 0) <= record.inventory.memory_bytes, f"{name}: memory promised beyond what is there")


def _check_promises(state: ClusterState, ledger: Ledger) -> None:
    for key, promised in ledger.accepted.items():
        workload = state.workloads.get(key)
        demand(2, workload is not None, f"{key} was accepted and is gone")
        assert workload is not None
        same = (as_begun(workload), workload.submitted_ns) == (as_begun(promised), promised.submitted_ns)
        demand(2, same, f"{key} is not what was accepted")
        is_over = workload.phase is WorkloadPhase.CANCELLED
        demand(2, is_over or key not in ledger.cancelled, f"{key} was cancelled and is {workload.phase.name}")
    for key, workload in state.workloads.items():
        demand(2, not key.startswith("dream-"), f"{key} was only imagined")
        placements = workload.placements if workload.phase is WorkloadPhase.PLACED else ()
        demand(2, placements == ledger.placed.get(key, ()), f"{key} stands elsewhere than the events say")
    demand(2, state.policy.revision >= ledger.policy.revision, "an accepted policy is gone")
    if state.policy.revision == ledger.policy.revision:
        demand(2, state.policy == ledger.policy, "the policy in force is not the one that was accepted")


# What agents send once in some minutes counts as fresh for so long.
SELDOM_FRESH_S = 1000.0


def check_freshness(controller: Controller, ledger: Ledger) -> None:
    """6: what counts as fresh is young by every clock, and the sums are over it alone."""
    life = controller.life
    if life is None:
        return
    telemetry, clock = life.telemetry, life.clock
    fresh_s = 3.0 * controller.sessions.policy.send_interval_s + 5.0
    now_s, now_ns = clock.monotonic_s(), clock.wall_ns()
    total_w, gpus = 0.0, 0
    for name, feed in ledger.ticks.feeds(telemetry).items():
        tick = telemetry.fresh_tick(name, now_s=now_s, now_ns=now_ns)
        if tick is None:
            continue
        fact = feed.latest
        demand(6, fact is not None, f"{name}: fresh readings out of nothing")
        assert fact is not None
        age_s = max(now_s - feed.received_s, (now_ns - fact.time_ns) / 1e9)
        demand(6, age_s <= fresh_s, f"{name}: readings {age_s:.1f} s old count as fresh")
        for reading, cells in tick.gpus.items():
            of, received_s = feed.newest[reading]
            demand(6, cells == of.cells[reading], f"{name}: {reading.name} is not that of the newest tick that has it")
            age_s = max(now_s - received_s, (now_ns - of.time_ns) / 1e9)
            demand(6, age_s <= SELDOM_FRESH_S, f"{name}: {reading.name} is {age_s:.1f} s old and counts as fresh")
            demand(6, reading is not Reading.POWER_W or age_s <= fresh_s, f"{name}: power of {age_s:.1f} s ago")
        powers = [value for value in tick.gpus.get(Reading.POWER_W, ()) if value is not None]
        total_w, gpus = total_w + sum(powers), gpus + len(powers)
    rogues = [life.core.state.nodes[name] for name in life.core.state.nodes if name.startswith(ROGUE)]
    for tick in (telemetry.fresh_tick(one.inventory.node_name, now_s=now_s, now_ns=now_ns) for one in rogues):
        powers = [] if tick is None else [value for value in tick.gpus.get(Reading.POWER_W, ()) if value is not None]
        total_w, gpus = total_w + sum(powers), gpus + len(powers)
    sums = telemetry.fresh_power(now_s=now_s, now_ns=now_ns)
    demand(6, sums.gpus == gpus, f"{sums.gpus} devices in the sum of power, {gpus} have fresh readings")
    demand(6, math.isclose(sums.power_w, total_w, abs_tol=1e-6), f"the sum of power is {sums.power_w}, not {total_w}")


def check_end(controller: Controller, agents: list[Agent], ledger: Ledger) -> None:
    """What must hold once faults have stopped and everybody had time."""
    life = controller.life
    demand(4, life is not None and life.is_settled, "the controller does not run")
    assert life is not None
    for agent in agents:
        _check_converged(agent, life)
        ledger.ticks.running[agent.name].conserve()
    # Last, since it takes longest and this is asked until all holds.
    demand(3, ledger.replayed().digest() == life.core.state.digest(), "the whole journal does not give the live state")


def _check_converged(agent: Agent, life: Life) -> None:
    name, node = agent.name, agent.node
    record = life.core.state.nodes.get(name)
    demand(4, node is not None and node.connected, f"{name}: the agent is not connected")
    demand(4, record is not None and record.state is NodeState.READY, f"{name}: the node is not ready")
    assert node is not None
    assert record is not None
    demand(4, record.inventory == node.inventory, f"{name}: the controller knows another inventory")
    plan = life.core.node_plan(name)
    # A node that was never given anything is at epoch 0 and has no plan.
    held = node.guard.plan.assignments if node.guard.plan else ()
    demand(4, held == plan.assignments, f"{name}: holds epoch {node.guard.epoch}, planned is epoch {plan.epoch}")
    if plan.epoch:
        demand(4, node.guard.plan == plan, f"{name}: the plan in force is not the planned one")
        demand(4, not node.guard.expired, f"{name}: connected, but the lease of plan {plan.epoch} is over")
        demand(
            4, life.telemetry.plan_applied(name) == node.guard.applied, f"{name}: the answer to the plan did not arrive"
        )
    _check_runs(agent, node.gpu_uuids, plan)
    lost = {gpu.identity.uuid for gpu in agent.device.devices if gpu.health is SimHealth.LOST} & set(node.gpu_uuids)
    demand(4, record.lost_gpus == lost, f"{name}: marked lost are {sorted(record.lost_gpus)}, lost are {sorted(lost)}")
    age_s = life.telemetry.age_s(name, now_s=life.clock.monotonic_s(), now_ns=life.clock.wall_ns())
    demand(5, age_s is not None, f"{name}: connected, but no reading arrived")


def _check_runs(agent: Agent, gpu_uuids: tuple[str, ...], plan: NodePlan) -> None:
    """Every device that answers runs what the plan gives it; what needs a device that is gone cannot run."""
    shares = dict.fromkeys(gpu_uuids, 0)
    for item in plan.assignments:
        if shares.keys() >= set(item.gpu_uuids):
            for uuid in item.gpu_uuids:
                shares[uuid] += item.gpu_milli
    for gpu in agent.device.devices:
        uuid = gpu.identity.uuid
        if gpu.health is SimHealth.OK:
            demand(4, uuid in gpu_uuids, f"{agent.name}: {uuid} answers and is not in the inventory")
            runs_milli = round(gpu.loads.total.utilization_ratio * GPU_MILLI_WHOLE)
            demand(
                4,
                runs_milli == shares[uuid],
                f"{agent.name}: {uuid} runs {runs_milli} milli, planned is {shares[uuid]}",
            )
