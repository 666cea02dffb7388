"""Slow, obvious twin of eelgrid_kernels.baselines: every policy's rule in plain Python, every node looked at anew.

No states, no kept scores: each arrival scores each node. Formulas that the
planner has too (power, F, stranding) are those of tests.naive.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

from tests import naive, naive_lookahead


@dataclass
class Machine:
    node: naive.Node
    rank: int
    # The kinds of GPU tasks that it holds: "share" or the number of GPUs.
    held: set = field(default_factory=set)


@dataclass
class Outcome:
    nodes: list[int]
    power_w: list[float]
    arrived: list[int]
    allocated: list[int]


def whole(value):
    """int() of Go and C: towards zero."""
    return math.trunc(value)


def kind_of(task):
    return "share" if task.gpu_count == 1 and task.gpu_milli < 1000 else task.gpu_count


def free_gpu(node):
    return sum(gpu.free for gpu in naive.placeable(node))


def tightest(node, task):
    if task.gpu_count != 1:
        return naive.choices(node, task)[0]
    return min(naive.choices(node, task), key=lambda slots: (node.gpus[slots[0]].free, slots[0]))


def watts_eased(node, slots, task):
    return whole(naive.node_power(node) - naive.node_power(naive.placed(node, slots, task)))


def fgd(node, slots, task, mix):
    total = max(1, sum(entry.weight for entry in mix))
    before, after = naive.fragmentation(node, mix), naive.fragmentation(naive.placed(node, slots, task), mix)
    return whole(100 / (1 + math.exp(-((before - after) / (total * 1000)))))


def best_fit(node, task):
    cpu = Fraction(node.cpu_free - task.cpu_milli, 128_000)
    gpu = Fraction(free_gpu(node) - task.gpu_count * task.gpu_milli, 8000)
    return math.floor(100 * (1 - cpu / 2 - gpu / 2))


def dot_prod(node, task):
    cpu = Fraction(node.cpu_free * task.cpu_milli, 128_000**2)
    gpu = Fraction(free_gpu(node) * task.gpu_count * task.gpu_milli, 8000**2)
    return math.floor(100 * (1 - (cpu + gpu) / 2))


def packing(node, task):
    if task.gpu_count == 0:
        return 0
    slots, count = tightest(node, task), len(node.gpus)
    if all(gpu.free == 1000 for gpu in node.gpus):
        return max(33 - count, count)
    if all(node.gpus[slot].free == 1000 for slot in slots):
        return max(50 - task.gpu_count, 33)
    return max(100 - node.gpus[slots[0]].free // 100, 50)


def clustering(machine, task):
    if task.gpu_count == 0:
        return 0
    kind = kind_of(task)
    held = 75 if machine.held == {kind} else 50 if kind in machine.held else 0 if machine.held else 25
    return held + 25 * (8000 - free_gpu(machine.node)) // 8000


def scaled(values):
    low, high = min(values), max(values)
    return [100 if low == high else (value - low) * 100 // (high - low) for value in values]


def mixed(machines, task, mix, weights):
    power_weight, fgd_weight = weights
    options = [naive.choices(machine.node, task) for machine in machines]
    power = [max(watts_eased(m.node, s, task) for s in choices) for m, choices in zip(machines, options, strict=True)]
    found = []
    for machine, choices, norm in zip(machines, options, scaled(power), strict=True):
        if fgd_weight:
            slots = max(choices, key=lambda slots: fgd(machine.node, slots, task, mix))
            found.append((power_weight * norm + fgd_weight * fgd(machine.node, slots, task, mix), slots))
        else:
            found.append((power_weight * norm, max(choices, key=lambda slots: watts_eased(machine.node, slots, task))))
    return found


def starved(node, mix, market):
    """S: what tests.naive has, less the places for several GPUs."""
    blocks = naive_lookahead.blocks(node, mix, market.block_permille, market.part_permille)
    return naive.starved(node, mix) - naive.FEED_MILLI * blocks


def cost_w(node, slots, task, mix, market):
    """The cost of tests.naive and what the look-ahead adds, with integers subtracted before any division."""
    after = naive.placed(node, slots, task)
    fragments = naive.fragmentation(after, mix) - naive.fragmentation(node, mix)
    total = max(1, sum(entry.weight for entry in mix))
    stranded = (starved(after, mix, market) - starved(node, mix, market)) / naive.STRANDED_UNIT
    added_w = naive.node_power(after) - naive.node_power(node)
    lost = naive_lookahead.lost(node, slots, task, mix, market.offers) / total
    taken = sum(task.gpu_milli for slot in slots if node.gpus[slot].model in market.scarce) / 1000
    unused_w = naive_lookahead.unused_w(after)
    terms = (added_w, fragments / (total * 1000), stranded, lost, taken, unused_w)
    return sum(weight * term for weight, term in zip(market.weights(), terms, strict=True))


def ours(machine, task, mix, market):
    def cost(slots):
        return cost_w(machine.node, slots, task, mix, market)

    slots = min(naive.choices(machine.node, task), key=cost)
    return -cost(slots), slots


def market_of(policy, weights, machines, mix):
    """Quotes, which eelgrid alone heeds."""
    used = {gpu.model for machine in machines for gpu in machine.node.gpus}
    named = {model for entry in mix for model in entry.task.models or ()}
    return naive_lookahead.Market(weights, mix, 1 + max(used | named, default=0)) if policy == "eelgrid" else None


def scored(policy, weights, machines, task, mix, market=None):
    """(score, slots) of each machine; all of them fit. The market is for eelgrid."""
    if policy == "mix":
        return mixed(machines, task, mix, weights)
    if policy == "eelgrid":
        return [ours(machine, task, mix, market) for machine in machines]
    rules = {
        "bestfit": lambda: scaled([best_fit(machine.node, task) for machine in machines]),
        "dotprod": lambda: [dot_prod(machine.node, task) for machine in machines],
        "gpupacking": lambda: [packing(machine.node, task) for machine in machines],
        "gpuclustering": lambda: [clustering(machine, task) for machine in machines],
    }
    slots = [tightest(machine.node, task) for machine in machines]
    return list(zip(rules[policy](), slots, strict=True))


def run(machines, tasks, mix, policy, weights):
    """Every task in order; machines change."""
    outcome = Outcome([], [], [], [])
    market = market_of(policy, weights, machines, mix)
    arrived = allocated = 0
    for task in tasks:
        asked = task.gpu_count * task.gpu_milli
        arrived += asked
        fitting = [machine for machine in machines if naive.verdict(machine.node, task) is None]
        chosen = -1
        if market:
            market.requote([machine.node for machine in machines])
        if fitting:
            scores = scored(policy, weights, fitting, task, mix, market)
            best = max(range(len(fitting)), key=lambda i: (scores[i][0], -fitting[i].rank))
            machine = fitting[best]
            chosen = machines.index(machine)
            machine.node = naive.placed(machine.node, scores[best][1], task)
            if task.gpu_count:
                machine.held.add(kind_of(task))
            allocated += asked
            if market:
                market.moved(task)
        outcome.nodes.append(chosen)
        outcome.power_w.append(sum(naive.node_power(machine.node) for machine in machines))
        outcome.arrived.append(arrived)
        outcome.allocated.append(allocated)
    return outcome
