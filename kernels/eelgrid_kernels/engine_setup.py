"""Set-up of the placement engine: allocates its arrays from node shapes and the expected task mix.

Owns how large each array is and how the mix becomes groups. Must not know where
shapes and tasks come from.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.argmin_index import BLOCK, is_scaled
from eelgrid_kernels.arrays import (
    CAPTIVE,
    ENOUGH_BLOCKS,
    KIND,
    NEVER,
    NO_SPARE_BLOCKS,
    NODE,
    RELIEF,
    SCALARS,
    SCARCE_BLOCKS,
    SHAPE,
    STATE,
    STRANDING,
    STRANDING_WHEN_FULL,
    USABLE,
    WEIGHTS,
    ClassArrays,
    CostIndex,
    EngineArrays,
    FeedArrays,
    Floats,
    GroupArrays,
    Ints,
    Mix,
    Records,
)
from eelgrid_kernels.baselines import GPU_CLUSTERING, PlacementPolicy
from eelgrid_kernels.cost_terms import FEED_MILLI, FEED_SHARE, MILLIWATTS, SEVERAL, STRANDED_UNIT, WHOLE
from eelgrid_kernels.opportunity_prices import RISE_PERMILLE

MODELS_MOST = 62  # bits of a set
HORIZON_SHARE = 0.06
COVERED_PERCENT = 95  # of the tasks, by the classes of a mix
# Of the nodes' CPU, asked for where the mix fills all GPUs: it is gone before the load from which stranding weighs more.
CPU_SCARCE = Fraction(1000, RISE_PERMILLE)
_UNIONS_MOST = 1024
TAGS_MOST = 62
_MILLI_PER_CPU = 1000
_LOG_PER_NODE = 4  # a kind that is asked for once in so many changes per node weighs everything anew
_LOG_LEAST = 1024


class NodeShapes(NamedTuple):
    """What nodes are when empty, each shape once."""

    rows: Records  # (P,) SHAPE
    slot_model: Ints  # (P, G) -1 for a slot that takes no task
    added_w: Floats  # (P, G) of a GPU that goes from idle to busy
    families: tuple[int, ...]  # sets of models, as bits


class NodeColumns(NamedTuple):
    """The nodes, when empty."""

    shape: Ints  # (N,) row of the shapes
    rank: Ints  # (N,) order among equals
    memory: Ints  # (N,)


class CaptiveDemand(NamedTuple):
    """Whose tasks can use which models alone."""

    table: Records  # (D,) CAPTIVE
    unions: int  # how many rows have one
    sets: int
    milli: int  # the sum of what they ask for


class BlockDemand(NamedTuple):
    """A class that asks for several GPUs."""

    gpus: int
    cpu_milli: int
    demand: Fraction  # tasks of the class in each milli-GPU that the mix asks for


class ExpectedMix(NamedTuple):
    """The typical mix, class by class and as groups of classes."""

    groups: GroupArrays
    classes: ClassArrays
    feed: FeedArrays
    blocks: tuple[BlockDemand, ...]
    class_weight: Ints  # (C,)
    captive: CaptiveDemand
    fragmentation_scale: float  # what F is divided by
    asked: tuple[int, int]  # milli-GPU and milli-CPU of all tasks, weighted


def encode_models(allows: NDArray[Any]) -> int:
    """A set of models as bits, from 1 where the model is in it (M,)."""
    if len(allows) > MODELS_MOST:
        raise ValueError(f"there are {len(allows)} GPU models; a fleet may have {MODELS_MOST}")
    return sum(1 << model for model, allowed in enumerate(allows.tolist()) if allowed)


def encode_task_sorts(gpu_count: Ints, gpu_milli: Ints) -> Ints:
    """The sort of GPU task to GPU_CLUSTERING (K,): 0 for a share, n for n GPUs, -1 without."""
    whole = np.minimum(gpu_count, TAGS_MOST - 1)
    return np.where(gpu_count == 0, -1, np.where((gpu_count == 1) & (gpu_milli < WHOLE), 0, whole)).astype(np.int64)


def sort_bit(gpu_count: int, gpu_milli: int) -> int:
    """The bit of the sort of a GPU task; 0 without GPU."""
    tag = -1 if gpu_count == 0 else 0 if gpu_count == 1 and gpu_milli < WHOLE else min(gpu_count, TAGS_MOST - 1)
    return 1 << tag if tag >= 0 else 0


def build_kinds(cpu_milli: Ints, memory: Ints, gpu_count: Ints, gpu_milli: Ints, models: Ints) -> Records:
    """The kinds (K,) that ask for this; models are bits."""
    kinds = np.zeros(len(cpu_milli), KIND)
    kinds["cpu_milli"], kinds["memory"], kinds["models"] = cpu_milli, memory, models
    kinds["gpu_count"], kinds["gpu_milli"] = gpu_count, gpu_milli
    kinds["tag"], kinds["read"] = encode_task_sorts(gpu_count, gpu_milli), NEVER
    return kinds


def build_shapes(cpu_capacity: Ints, slot_model: Ints, added_w: Floats) -> NodeShapes:
    """The shapes with this CPU (P,), model of each slot (P, G), -1 for none, and watts of each (P, G)."""
    if int(slot_model.max(initial=-1)) >= MODELS_MOST:
        raise ValueError(f"there are {int(slot_model.max()) + 1} GPU models; a fleet may have {MODELS_MOST}")
    models = [sum(1 << each for each in set(row) if each >= 0) for row in slot_model.tolist()]
    families = tuple(sorted(set(models)))
    rows = np.zeros(len(models), SHAPE)
    rows["cpu_capacity"], rows["models"] = cpu_capacity, models
    rows["family"], rows["width"] = [families.index(each) for each in models], (slot_model >= 0).sum(axis=1)
    return NodeShapes(rows, np.ascontiguousarray(slot_model, np.int64), np.ascontiguousarray(added_w), families)


def _groups(mix: Mix, models: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Classes of the mix that nodes with these models cannot tell apart but by CPU."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for t in range(len(mix.weight)):
        allowed = tuple(int(mix.allows[model, t]) for model in models)
        if mix.gpu_count[t] > 0 and any(allowed):
            groups.setdefault((int(mix.gpu_count[t]), int(mix.gpu_milli[t]), *allowed), []).append(t)
    return groups


def build_expected_mix(mix: Mix, families: Sequence[int]) -> ExpectedMix:
    """The typical mix for nodes with each of these sets of models."""
    return ExpectedMix(
        _build_groups(mix, families),
        _build_classes(mix),
        _build_feed(mix, families),
        _list_blocks(mix),
        np.ascontiguousarray(mix.weight, np.int64),
        _find_captive_demand(mix),
        mix.total * float(WHOLE),
        (int(np.sum(mix.weight * mix.gpu_count * mix.gpu_milli)), int(np.sum(mix.weight * mix.cpu_milli))),
    )


def _build_groups(mix: Mix, families: Sequence[int]) -> GroupArrays:
    sizes = np.unique(mix.cpu_milli).astype(np.int64)
    whole = np.arange(1 + int(sizes.max(initial=0)) // _MILLI_PER_CPU) * _MILLI_PER_CPU
    every = [[model for model in range(mix.allows.shape[0]) if family >> model & 1] for family in families]
    found = [_groups(mix, models) for models in every]
    widest = max([1, *map(len, found)])
    groups = GroupArrays(
        group_count=np.array([len(each) for each in found], np.int64),
        gpu_count=np.zeros((len(families), widest), np.int64),
        gpu_milli=np.zeros((len(families), widest), np.int64),
        allows=np.zeros((len(families), max(1, mix.allows.shape[0]), widest), np.int64),
        weight=np.zeros((len(families), len(sizes) + 1, widest), np.int64),
        cpu_sizes=np.append(sizes, np.iinfo(np.int64).max),
        quick_level=np.searchsorted(sizes, whole, side="right").astype(np.int64),
    )
    for family, models in enumerate(every):
        for q, (key, classes) in enumerate(found[family].items()):
            groups.gpu_count[family, q], groups.gpu_milli[family, q] = key[:2]
            for model, allowed in zip(models, key[2:], strict=True):
                groups.allows[family, model, q] = allowed
            for t in classes:
                groups.weight[family, int(np.searchsorted(sizes, mix.cpu_milli[t])) + 1 :, q] += mix.weight[t]
    return groups


def _feed_share(asked: int, total: int) -> int:
    """A class's share of the demand for GPU, rounded, in FEED_SHARE."""
    return (2 * FEED_SHARE * asked + total) // (2 * total)


def _feed_by_cpu(share: int, gpu_milli: int, cpu_milli: int) -> int:
    """What a milli-CPU feeds of a class that asks for so much GPU and CPU, by its share, in thousandths of a milli-GPU."""
    return max(1, share * gpu_milli * FEED_MILLI // cpu_milli)


def _build_feed(mix: Mix, families: Sequence[int]) -> FeedArrays:
    """What CPU feeds, by family of nodes: a class counts where one of the models serves it, a block where all do."""
    asked = (mix.weight * mix.gpu_count * mix.gpu_milli).tolist()
    each = (mix.gpu_count * mix.gpu_milli).tolist()
    feed = FeedArrays(*(np.zeros((len(families), max(1, len(asked))), np.int64) for _ in FeedArrays._fields))
    for family, bits in enumerate(families):
        models = [model for model in range(mix.allows.shape[0]) if bits >> model & 1]
        served = [t for t in range(len(asked)) if asked[t] and any(mix.allows[model, t] for model in models)]
        total, fed = sum(asked[t] for t in served), []
        for t in served:
            share = _feed_share(asked[t], total)
            if share and mix.cpu_milli[t] > 0:
                fed.append((share, _feed_by_cpu(share, each[t], int(mix.cpu_milli[t]))))
        fed.sort(key=lambda pair: Fraction(*pair), reverse=True)
        for place, pair in enumerate(fed):
            feed.gpu[family, place], feed.cpu[family, place] = pair
        blocks = [t for t in served if mix.gpu_count[t] > 1 and all(mix.allows[model, t] for model in models)]
        for place, t in enumerate(blocks):
            feed.block_gpus[family, place], feed.block_cpu[family, place] = mix.gpu_count[t], mix.cpu_milli[t]
            feed.block_class[family, place] = t
            feed.block_worth[family, place] = int(mix.gpu_count[t]) * _feed_share(asked[t], sum(asked))
    return feed


def _list_blocks(mix: Mix) -> tuple[BlockDemand, ...]:
    asked = int(np.sum(mix.weight * mix.gpu_count * mix.gpu_milli))
    rows = zip(mix.gpu_count.tolist(), mix.cpu_milli.tolist(), mix.weight.tolist(), strict=True)
    return tuple(BlockDemand(gpus, cpu, Fraction(weight, asked)) for gpus, cpu, weight in rows if gpus > 1)


def rate_block_scarcity(shapes: Records, counts: Ints, blocks: Sequence[BlockDemand]) -> int:
    """How scarce places for several GPUs are where the mix fills all nodes: ENOUGH_BLOCKS, SCARCE_BLOCKS or NO_SPARE_BLOCKS.

    There are counts (P,) nodes of each shape (P,). Each class is asked for as a part of the places that the nodes would
    have for it alone; scarce is what in sum is more than all of them. None is to spare where the tasks with some number of
    GPUs or more ask for COVERED_PERCENT, as much as the mix stands for, of all GPUs that the nodes have in groups of that
    number. Models are of no account, and a class that fits no node is left out.
    """
    empty: dict[tuple[int, int], int] = {}
    for *kind, count in zip(shapes["width"].tolist(), shapes["cpu_capacity"].tolist(), counts.tolist(), strict=True):
        empty[kind[0], kind[1]] = empty.get((kind[0], kind[1]), 0) + count
    capacity, used = int(shapes["width"] @ counts) * WHOLE, Fraction(0)
    for block in blocks:
        places = 0
        for (width, cpu), count in empty.items():
            fitting = width // block.gpus
            places += count * (min(fitting, cpu // block.cpu_milli) if block.cpu_milli else fitting)
        used += capacity * block.demand / places if places else 0
    if used <= 1:
        return ENOUGH_BLOCKS
    for gpus in {block.gpus for block in blocks}:
        grouped = sum(width // gpus * gpus * count for (width, _), count in empty.items())
        asked = capacity * sum(block.gpus * block.demand for block in blocks if block.gpus >= gpus)
        if grouped and 100 * asked >= COVERED_PERCENT * grouped:
            return NO_SPARE_BLOCKS
    return SCARCE_BLOCKS


def _build_classes(mix: Mix) -> ClassArrays:
    beside = np.where(mix.gpu_count == 0, 0, np.where(mix.gpu_count > 1, SEVERAL, mix.gpu_milli))
    cpu_only = mix.gpu_count == 0
    wanted = np.where(np.vstack([mix.allows != 0, np.zeros_like(cpu_only)[None]]) | cpu_only, mix.weight, 0)
    columns = (mix.cpu_milli, mix.gpu_count, beside, wanted, np.zeros(len(mix.weight)))
    return ClassArrays(*(np.array(column, np.float64, order="C") for column in columns))


def _find_captive_demand(mix: Mix) -> CaptiveDemand:
    asked: dict[int, int] = {}
    demand = mix.weight * mix.gpu_count * mix.gpu_milli
    for column, milli in zip(mix.allows.T, demand.tolist(), strict=True):
        if milli:
            asked[encode_models(column)] = asked.get(encode_models(column), 0) + milli
    unions: list[int] = []
    for each in sorted(asked):
        if len(unions) < _UNIONS_MOST:  # beyond it the sets themselves and what unions they made
            unions.extend(sorted({each | other for other in (0, *unions)} - set(unions)))
    unions = sorted({*unions[:_UNIONS_MOST], *asked})
    table = np.zeros(max(1, len(unions)), CAPTIVE)
    table["union"][: len(unions)] = unions
    table["models"][: len(asked)] = sorted(asked)
    table["milli"][: len(asked)] = [asked[each] for each in sorted(asked)]
    return CaptiveDemand(table, len(unions), len(asked), sum(asked.values()))


def fill_fleet_scalars(scalars: Records, shapes: Records, shape: Ints, expected: ExpectedMix) -> None:
    """Put into the scalars what follows from the shape of each node (N,), a row of shapes (P,).

    These are GPUs and CPU, what of them is scarce, how far to look.
    """
    (gpu, cpu), total = expected.asked, max(1, int(expected.class_weight.sum()))
    counts = np.bincount(shape, minlength=len(shapes))
    gpu_milli, cpu_milli = int(shapes["width"] @ counts) * WHOLE, int(shapes["cpu_capacity"] @ counts)
    tasks = gpu_milli / (gpu / total) if gpu and gpu_milli else cpu_milli / (cpu / total) if cpu else 0.0
    scalars["capacity_milli"], scalars["horizon"] = gpu_milli, max(1, round(HORIZON_SHARE * tasks))
    scalars["cpu_capacity"], scalars["block_scarcity"] = cpu_milli, rate_block_scarcity(shapes, counts, expected.blocks)
    scalars["cpu_scarce"] = gpu > 0 and cpu * gpu_milli > CPU_SCARCE * gpu * cpu_milli


def _random_seed(rank: Ints) -> int:
    """The only draw that a run is given: RANDOM's go by the order of the nodes."""
    seed = 0
    for place in rank.tolist():
        seed = (seed * 1_000_003 + place + 1) % (1 << 32)
    return seed


def _build_nodes(columns: NodeColumns) -> Records:
    nodes = np.zeros(len(columns.shape), NODE)
    nodes["shape_row"], nodes["rank"], nodes["memory"] = columns
    for field in ("state", "left", "right"):
        nodes[field] = -1
    return nodes


def _fill_mix_scalars(scalars: Records, expected: ExpectedMix) -> None:
    weight, captive = int(expected.class_weight.sum()), expected.captive
    scalars["mix_weight"], scalars["captive_milli"] = weight, captive.milli
    scalars["captive_unions"], scalars["captive_sets"] = captive.unions, captive.sets
    scalars["scale"] = (1.0, expected.fragmentation_scale, STRANDED_UNIT, max(1, weight), WHOLE, MILLIWATTS, 1.0)


def _build_scalars(expected: ExpectedMix, policy: PlacementPolicy, rank: Ints) -> Records:
    scalars = np.zeros(1, SCALARS)
    scalars["policy"], scalars["seed"], scalars["shifts"] = policy.code, _random_seed(rank), -1
    _fill_mix_scalars(scalars, expected)
    given = np.zeros(WEIGHTS)
    given[: len(policy.weights)] = policy.weights
    if len(policy.weights) <= STRANDING_WHEN_FULL:  # stranding weighs the same at any load
        given[STRANDING_WHEN_FULL] = given[STRANDING]
    scalars["given_weights"] = scalars["weights"] = given
    return scalars


def _build_index(kinds: int, rows: int, scaled: bool) -> CostIndex:
    blocks = (rows + BLOCK - 1) // BLOCK
    return CostIndex(
        cost=np.zeros((kinds, rows)),
        known=np.zeros((kinds, rows), np.uint8),
        rank=np.zeros((kinds, rows), np.int32),
        scaled=np.zeros((kinds, rows if scaled else 0)),
        top=np.zeros((kinds, blocks), np.int32),
        top_cost=np.zeros((kinds, blocks)),
    )


def _mix_arrays(expected: ExpectedMix, rows: int) -> dict[str, Any]:
    """The arrays whose size or content follows from the mix, of an engine with so many rows for states."""
    groups, wanted = expected.groups, expected.classes.wanted
    return {
        "usable": np.zeros((rows, groups.gpu_count.shape[1]), USABLE),
        "groups": groups,
        "classes": expected.classes,
        "feed": expected.feed,
        # A copy: a mix of read-only arrays would be a type of its own, for which everything is compiled once more.
        "class_weight": expected.class_weight.copy(),
        "relief": np.zeros((wanted.shape[0], groups.weight.shape[1]), RELIEF),
        "captive": expected.captive.table,
    }


def replace_mix(run: EngineArrays, expected: ExpectedMix, shape: Ints) -> EngineArrays:
    """The same nodes, of these shapes (N,), under another mix of the same models.

    States stay, and are filled by the new mix by the next `adopt_nodes`. Kinds know no cost, and no offers are in force.
    """
    _fill_mix_scalars(run.scalars, expected)
    fill_fleet_scalars(run.scalars, run.shapes, shape, expected)
    run.scalars["stale_states"] = 1
    run.kinds["read"], run.kinds["loose"] = NEVER, 0.0
    return run._replace(**_mix_arrays(expected, len(run.states)))


def build_engine(
    shapes: NodeShapes, kinds: Records, expected: ExpectedMix, nodes: NodeColumns, policy: PlacementPolicy
) -> EngineArrays:
    """A fleet whose nodes are in no state yet.

    The policy's weights are (PWR, FGD) of MIX; one per term of EELGRID, and that of stranding in a full fleet; other
    policies take none.
    """
    rows, slots = len(nodes.shape), shapes.added_w.shape[1]
    states = np.zeros(rows, STATE)
    states["root"] = -1
    scalars = _build_scalars(expected, policy, nodes.rank)
    fill_fleet_scalars(scalars, shapes.rows, nodes.shape, expected)
    power, fragmentation = scalars["weights"][0, :2].tolist()
    return EngineArrays(
        nodes=_build_nodes(nodes),
        states=states,
        gpu_free=np.zeros((rows, slots), np.int64),
        distinct_slots=np.zeros((rows, slots), np.int64),
        shapes=shapes.rows,
        slot_model=shapes.slot_model,
        added_w=shapes.added_w,
        kinds=kinds,
        **_mix_arrays(expected, rows),
        scalars=scalars,
        held=np.zeros((rows, TAGS_MOST if policy.code == GPU_CLUSTERING else 0), np.int64),
        bucket=np.full(1 << (2 * rows).bit_length(), -1, np.int64),
        spare=np.zeros(rows, np.int64),
        log=np.zeros(1 << max(_LOG_LEAST, _LOG_PER_NODE * rows).bit_length(), np.int64),
        cost_index=_build_index(len(kinds), rows, is_scaled(policy.code, power, fragmentation)),
        gpu=np.zeros(slots, np.int64),
        taken=np.full(slots, -1, np.int64),
    )
