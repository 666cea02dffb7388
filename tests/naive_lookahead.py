"""Slow, obvious twins of the look-ahead: gains, offers, scarce models and when they are quoted, in plain Python.

Every node, class and set of models is looked at anew each time; nothing is kept but
the quotes themselves. Formulas of power and placing are those of tests.naive.
"""

from bisect import bisect
from fractions import Fraction
from itertools import combinations
from math import ceil, erfc, sqrt
from operator import itemgetter
from typing import NamedTuple

from tests import naive

PACKAGES_MOST = 4
DEAREST_W = 8192
ROUNDS = 4
MANY_PLACES = 1 << 20


def models_of(node):
    """The models that a node offers; None stands for a node without any."""
    return sorted({gpu.model for gpu in naive.placeable(node)}) or [None]


def serves(model, task):
    return not task.gpu_count or (model is not None and (task.models is None or model in task.models))


def added_w(node, model, task):
    """dP(n, t) by the GPUs of one model, or None where the task does not fit."""
    if task.cpu_milli > node.cpu_free or not serves(model, task):
        return None
    before = naive.package_power(node.cpu_capacity, node.cpu_free)
    after = naive.package_power(node.cpu_capacity, node.cpu_free - task.cpu_milli)
    packages_w = min(after - before, PACKAGES_MOST * 105.0)
    if not task.gpu_count:
        return packages_w
    gpus = [gpu for gpu in naive.placeable(node) if gpu.model == model]
    idle = [gpu for gpu in gpus if gpu.free == 1000]
    if task.gpu_count == 1 and any(gpu.free < 1000 and gpu.free >= task.gpu_milli for gpu in gpus):
        return packages_w
    if len(idle) < task.gpu_count:
        return None
    return packages_w + task.gpu_count * round(min(gpu.busy_w - gpu.idle_w for gpu in idle))


def gain(node, mix, offers):
    """G of a node, weighted: by the model with which the next task saves most."""
    gains = [0]
    for model in models_of(node):
        saved = 0
        for entry, offer in zip(mix, offers, strict=True):
            watts = added_w(node, model, entry.task)
            saved += entry.weight * max(0, offer - watts) if watts is not None else 0
        gains.append(saved)
    return max(gains)


def lost(node, slots, task, mix, offers):
    """What a placement takes away from G, weighted."""
    return gain(node, mix, offers) - gain(naive.placed(node, slots, task), mix, offers)


def slack(node):
    """Milli-CPU that a task may take before another package wakes."""
    asleep, taken = naive.package_power(node.cpu_capacity, node.cpu_free), range(node.cpu_free + 1)
    return bisect(taken, asleep, key=lambda milli: naive.package_power(node.cpu_capacity, node.cpu_free - milli)) - 1


def unused_w(node):
    """U: watts of what is awake and free, which are GPUs in use and CPU that wakes no package."""
    gpus = sum(gpu.free * int(gpu.busy_w - gpu.idle_w) for gpu in naive.placeable(node) if gpu.free < 1000)
    return (gpus + 105 * slack(node) // 32) / 1000


class Place(NamedTuple):
    """What counts of a node for the next tasks by the GPUs of one model; the larger, the emptier."""

    cpu_free: int
    idle: int
    beside: int  # the most that is free on a GPU in use
    unpacked: int
    saves_w: float  # minus the watts of the cheapest idle GPU
    rank: int  # minus the model


def place_of(node, model):
    gpus = [gpu for gpu in naive.placeable(node) if gpu.model == model]
    idle = [round(gpu.busy_w - gpu.idle_w) for gpu in gpus if gpu.free == 1000]
    beside = max((gpu.free for gpu in gpus if gpu.free < 1000), default=0)
    rank = 0 if model is None else -model
    return Place(node.cpu_free, len(idle), beside, slack(node), -min(idle, default=1e9), rank)


def shared(node, model):
    """What each GPU in use has left."""
    return [gpu.free for gpu in naive.placeable(node) if gpu.model == model and 0 < gpu.free < 1000]


def fits_beside(task, free):
    return task.gpu_count == 1 and task.gpu_milli <= free


def watts_at(place, task):
    """dP of a task at a place, or None where it does not fit."""
    packages = min(PACKAGES_MOST, max(0, ceil((task.cpu_milli - place.unpacked) / 32_000)))
    if task.cpu_milli > place.cpu_free:
        return None
    if not task.gpu_count or fits_beside(task, place.beside):
        return 105.0 * packages
    return 105.0 * packages - task.gpu_count * place.saves_w if task.gpu_count <= place.idle else None


def gain_at(place, model, mix, offers):
    """G by one model, weighted."""
    saved = 0
    for entry, offer in zip(mix, offers, strict=True):
        watts = watts_at(place, entry.task) if serves(model, entry.task) else None
        saved += entry.weight * max(0, offer - watts) if watts is not None else 0
    return saved


def after(place, task):
    """A place once it has taken a task, which goes to the GPU in use that has most left."""
    idle, beside, unpacked = place.idle, place.beside, place.unpacked
    if task.gpu_count and fits_beside(task, beside):
        beside -= task.gpu_milli
    elif task.gpu_count:
        idle -= task.gpu_count
        beside = max(beside, 1000 - task.gpu_milli) if task.gpu_count == 1 else beside
    unpacked += 32_000 * max(0, ceil((task.cpu_milli - unpacked) / 32_000)) - task.cpu_milli
    free = place.cpu_free - task.cpu_milli
    return place._replace(cpu_free=free, idle=idle, beside=beside, unpacked=min(free, unpacked))


def count_places(node, model, task):
    """Tasks that fit in a node for the watts of the first, and in all."""
    by_cpu = node.cpu_free // task.cpu_milli if task.cpu_milli else MANY_PLACES
    if not task.gpu_count:
        return max(1, slack(node) // task.cpu_milli if task.cpu_milli else MANY_PLACES), max(1, by_cpu)
    waking, left, beside = place_of(node, model).idle // task.gpu_count, shared(node, model), 0
    if fits_beside(task, max(left, default=0)):
        beside = min(len(left), sum(left) // task.gpu_milli)
    each = 1000 // task.gpu_milli if task.gpu_count == 1 else 1
    return max(1, min(beside or waking, by_cpu)), max(1, min(beside + waking * each, by_cpu))


def find_left(nodes, task, wanted):
    """The watts, the place and the model that are left when `wanted` others are taken, and the places in all."""
    found, in_all = [], 0
    for node in nodes:
        ways = [(watts, model) for model in models_of(node) if (watts := added_w(node, model, task)) is not None]
        if not ways or not node.available:
            continue
        watts, model = min(ways, key=itemgetter(0))  # the first of several
        first, most = count_places(node, model, task)
        found += [(min(DEAREST_W, int(watts)), place_of(node, model), model)] * min(first, wanted + 1)
        in_all += most
    if not found:
        return 0, None, None, 0
    watts = sorted(each[0] for each in found)[min(wanted, len(found) - 1)]
    _, place, model = max((each for each in found if each[0] == watts), key=lambda each: each[1])
    return watts, place, model, in_all


def horizon(nodes, mix):
    """Tasks of the mix that ask for six hundredths of the fleet."""
    total = max(1, sum(entry.weight for entry in mix))
    gpu = sum(entry.weight * entry.task.gpu_count * entry.task.gpu_milli for entry in mix) / total
    cpu = sum(entry.weight * entry.task.cpu_milli for entry in mix) / total
    gpus, cpus = capacity_milli(nodes), sum(node.cpu_capacity for node in nodes)
    tasks = gpus / gpu if gpu and gpus else cpus / cpu if cpu else 0.0
    return max(1, round(0.06 * tasks))


def asked_gpus(task):
    return task.gpu_milli / 1000 if task.gpu_count == 1 else task.gpu_count


def offers(nodes, mix, part, refused_w):
    """What the last of each class within the horizon costs elsewhere, less what it leaves there for others."""
    ahead, total = horizon(nodes, mix), max(1, sum(entry.weight for entry in mix))
    wanted = [max(1, ahead * entry.weight // total) for entry in mix]
    left = [find_left(nodes, entry.task, most) for entry, most in zip(mix, wanted, strict=True)]
    refused = [
        int(refused_w * asked_gpus(entry.task)) if 0 < in_all <= most else 0
        for entry, most, (*_, in_all) in zip(mix, wanted, left, strict=True)
    ]
    found = [watts + more for more, (watts, *_) in zip(refused, left, strict=True)]
    for _ in range(ROUNDS):
        before = list(found)
        for t, (watts, place, model, _) in enumerate(left):
            if place is not None:
                created = gain_at(after(place, mix[t].task), model, mix, before) - gain_at(place, model, mix, before)
                found[t] = (before[t] + int(max(0.0, watts - part * created / total)) + refused[t]) // 2
    return found


def stockouts(nodes, mix, models):
    """Thousandths, in steps of 50: how likely the places that are left for each class with several GPUs run out."""
    held = (capacity_milli(nodes) - sum(free_by_model(nodes, models))) / 1000
    total, found = sum(entry.weight * asked_gpus(entry.task) for entry in mix), []
    for entry in mix:
        count = entry.task.gpu_count
        larger = sum(each.weight * each.task.gpu_count for each in mix if each.task.gpu_count >= count)
        running = max(1.0, held * larger / total / count) if count > 1 else 1.0
        *_, places = find_left(nodes, entry.task, 1)
        found.append(int(1000 * erfc(places / (2 * sqrt(running))) + 25) // 50 * 50 if count > 1 else 0)
    return found


def free_by_model(nodes, models):
    free = [0] * models
    for node in nodes:
        for gpu in naive.placeable(node) if node.available else []:
            free[gpu.model] += gpu.free
    return free


def demand_by_set(mix, models):
    """Milli-GPU that the mix asks for, by the set of models that may serve it."""
    asked = {}
    for entry in mix:
        milli = entry.weight * entry.task.gpu_count * entry.task.gpu_milli
        chosen = frozenset(model for model in range(models) if serves(model, entry.task))
        if milli:
            asked[chosen] = asked.get(chosen, 0) + milli
    return asked


def shortage(chosen, free, asked, coming):
    """Milli-GPU that the tasks which can use nothing else would miss, if the mix asked for so many."""
    captive = sum(milli for models, milli in asked.items() if models <= chosen)
    short = float(captive) / float(sum(asked.values())) * coming
    for model in sorted(chosen):
        short -= free[model]
    return short


def unions(asked):
    """Every union of sets that classes may use, least bits first."""
    found = {frozenset().union(*each) for count in range(1, len(asked) + 1) for each in combinations(asked, count)}
    return sorted(found, key=lambda chosen: sum(1 << model for model in chosen))


def scarce(nodes, mix, models, turnover=0):
    """The set that is short by most, and by more than 20 to 1 thousandths of what is free, by turnover; empty if none is.

    The mix asks for all that is free, or where tasks leave as fast as they come, for no more than what is held now.
    """
    free, asked = free_by_model(nodes, models), demand_by_set(mix, models)
    total = float(sum(free))
    coming = total + (min(total, capacity_milli(nodes) - total) - total) * (turnover / 1000)
    best, chosen = (0.02 + (0.001 - 0.02) * (turnover / 1000)) * sum(free), frozenset()
    for each in unions(asked):
        if shortage(each, free, asked, coming) > best:
            best, chosen = shortage(each, free, asked, coming), each
    return chosen


def capacity_milli(nodes):
    return 1000 * sum(len(naive.placeable(node)) for node in nodes)


def load_permille(nodes):
    """What is held of all GPUs or of all CPU, whichever is more, in thousandths, down to a whole fiftieth."""
    held = capacity_milli(nodes) - sum(gpu.free for node in nodes for gpu in naive.placeable(node))
    cpus = sum(node.cpu_capacity for node in nodes)
    cpu_held = cpus - sum(node.cpu_free for node in nodes)
    return max(held * 1000 // max(1, capacity_milli(nodes)), cpu_held * 1000 // max(1, cpus)) // 20 * 20


def several(mix):
    return [entry for entry in mix if entry.task.gpu_count > 1]


def blocks(node, mix, weights, part):
    """Places for tasks with several GPUs, each by its GPUs, its share of the demand for GPU and its weight.

    The last is one that is almost there, in sixteenths, of which a part counts; weights and part are in thousandths.
    """
    gpus, worth = naive.placeable(node), 0
    idle = sum(gpu.free == 1000 for gpu in gpus)
    for entry, weight in zip(mix, weights, strict=True):
        if gpus and entry.task.gpu_count > 1 and all(entry.task.allows(gpu) for gpu in gpus):
            cpu, count = entry.task.cpu_milli, entry.task.gpu_count
            parts = min(16 * idle // count, 16 * node.cpu_free // cpu) if cpu else 16 * idle // count
            price = weight * count * naive.share(naive.demand(entry), sum(map(naive.demand, mix)))
            worth += price * (parts // 16) + price * (part * (parts % 16) ** 4 // 16**4) // 1000
    return worth


def block_scarcity(nodes, mix):
    """1 if a fleet full of the mix would hold more tasks with several GPUs than it can, class by class, when empty; else 0.

    2 if so, and tasks with some number of GPUs or more would hold 95 % of all GPUs that nodes have in groups of that number.
    """
    used, demand = Fraction(0), sum(map(naive.demand, mix))
    for entry in several(mix):
        cpu, count, places = entry.task.cpu_milli, entry.task.gpu_count, 0
        for node in nodes:
            fitting = len(naive.placeable(node)) // count
            places += min(fitting, node.cpu_capacity // cpu) if cpu else fitting
        if places:
            used += Fraction(capacity_milli(nodes) * entry.weight, demand) / places
    if used <= 1:
        return 0
    for count in {entry.task.gpu_count for entry in several(mix)}:
        grouped = 1000 * sum(len(naive.placeable(node)) // count * count for node in nodes)
        gpus = sum(entry.weight * entry.task.gpu_count for entry in mix if entry.task.gpu_count >= count)
        if grouped and 100 * 1000 * gpus * capacity_milli(nodes) >= 95 * grouped * demand:
            return 2
    return 1


def is_cpu_scarce(nodes, mix):
    """Whether the mix would have used all CPU when less than 70 % of the GPUs are held."""
    gpu, cpu = sum(map(naive.demand, mix)), sum(entry.weight * entry.task.cpu_milli for entry in mix)
    there = sum(node.cpu_capacity for node in nodes)
    return gpu > 0 and 7 * cpu * capacity_milli(nodes) > 10 * gpu * there


def rise(load):
    """From 0 at a load of seven tenths to 1 at a full fleet."""
    return max(0, load - 700) / 300


def stranding_w(load, least, most):
    """Least up to a load of seven tenths, then in a straight line to the most at a full fleet."""
    return least + (most - least) * rise(load)


def turnover(came, left):
    """Thousandths of what came that left, 1000 at most, to the nearest quarter."""
    return (min(1000, left * 1000 // max(1, came)) + 125) // 250 * 250


class Market:
    """The quotes in force for a fleet; weights are as the policy has them, seven or three."""

    def __init__(self, weights, mix, models):
        self.given = (*weights, 0.0, 0.0, 0.0, weights[2]) if len(weights) == 3 else tuple(weights)
        self.mix, self.models = mix, models
        self.offers, self.scarce, self.load, self.shifts = [0] * len(mix), frozenset(), 0, -1
        self.stockouts, self.block_permille = [0] * len(mix), [0] * len(mix)
        self.turnover = self.came = self.left = 0
        self.cpu_scarce = False

    @property
    def is_heeded(self):
        return bool(self.given[3] or self.given[4] or self.given[6] != self.given[2])

    def is_due(self, nodes):
        return self.is_heeded and (self.shifts < 0 or self.shifts >= max(1, horizon(nodes, self.mix) // 10))

    def requote(self, nodes):
        """Before each decision."""
        if self.is_due(nodes):
            new = offers(nodes, self.mix, min(1.0, self.given[3]), self.given[6])
            moved = sum(entry.weight * abs(a - b) for entry, a, b in zip(self.mix, new, self.offers, strict=True))
            if self.shifts < 0 or moved >= 10 * sum(entry.weight for entry in self.mix):
                self.offers = new  # else they hardly moved
            self.turnover = turnover(self.came, self.left)
            self.stockouts = stockouts(nodes, self.mix, self.models)
            self.scarce = scarce(nodes, self.mix, self.models, self.turnover)
            self.load, self.shifts = load_permille(nodes), 0
            self.came, self.left = self.came - self.came // 128, self.left - self.left // 128
            self.weigh_blocks(nodes)

    def stranding(self):
        """Where tasks leave as fast as they come, the least at any load; else from 0 to twice the least where CPU is scarce."""
        least, most = self.given[2], self.given[6]
        if self.cpu_scarce:
            filling = 1.0 - self.turnover / 1000
            return least - least * filling + 2 * least * filling * rise(self.load)
        return least + max(0.0, most - least) * (1.0 - self.turnover / 1000) * rise(self.load)

    def weigh_blocks(self, nodes):
        """Thousandths of the weight of stranding, for each class.

        Nothing up to a load of seven tenths, then in a straight line to the most; the least at first where none is to spare.
        Where tasks leave as fast as they come, scarce or not, half of the least, and to the most by the stockout or the
        square of the load's rise, whichever is more.
        """
        self.cpu_scarce = is_cpu_scarce(nodes, self.mix)
        low, most, now = 0.5 * self.given[2], self.given[6], self.stranding()
        scarcity, filling = block_scarcity(nodes, self.mix), 0.0
        if scarcity and self.cpu_scarce:
            filling = stranding_w(self.load, 0.0, 2 * self.given[2])
        elif scarcity:
            filling = stranding_w(self.load, self.given[2] if scarcity == 2 else 0.0, most)
        for t, stockout in enumerate(self.stockouts):
            steady = low + (most - low) * max(stockout / 1000, rise(self.load) * rise(self.load))
            weight = filling + (steady - filling) * (self.turnover / 1000)
            self.block_permille[t] = int(1000.0 * weight / now) if now else 0

    @property
    def part_permille(self):
        """What a place that is almost there counts of a whole one: half where tasks leave as fast as they come."""
        return 500 * self.turnover // 1000

    def moved(self, task, *, left=False):
        """A task came or left."""
        if self.shifts >= 0:
            self.shifts += 1
        if left:
            self.left += task.gpu_count * task.gpu_milli
        else:
            self.came += task.gpu_count * task.gpu_milli

    def weights(self):
        """Of the six terms, at the load that was quoted."""
        power, fragmentation, least, lookahead, scarcity, unused, _ = self.given
        stranding = self.stranding() if self.shifts >= 0 else least
        if self.shifts >= 0 and self.cpu_scarce:  # fragmentation takes the place of stranding
            fragmentation += max(0.0, 2 * least - fragmentation) * (1.0 - self.turnover / 1000)
        return power, fragmentation, stranding, lookahead, scarcity, unused
