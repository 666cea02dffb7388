"""Set-up of the placement engine: allocates its arrays from node shapes and the expected task mix.

Owns how large each array is and how the mix becomes groups. Must not know where
shapes and tasks come from.
"""
# ruff: noqa: PLR0917 (the parts of a run come one by one)

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eelgrid_kernels.argmin_index import BLOCK, is_scaled
from eelgrid_kernels.arrays import (
    CAPACITY,
    CAPACITY_MILLI,
    GIVEN,
    GPU,
    GROUP_ALLOWS,
    GROUP_COUNT,
    GROUP_MILLI,
    GROUPS,
    HORIZON,
    KIND_COLUMNS,
    LEFT,
    MEMORY,
    NEVER,
    NODE_COLUMNS,
    NODE_SHAPE,
    RANK,
    READ,
    RIGHT,
    ROOT,
    SCALE,
    SEED,
    SHIFTS,
    STATE,
    WEIGHT,
    WEIGHTS,
    WIDTH,
    EngineArrays,
    Floats,
    Ints,
    Mix,
)
from eelgrid_kernels.baselines import GPU_CLUSTERING
from eelgrid_kernels.cost_terms import SEVERAL, TERMS
from eelgrid_kernels.cpu_packages import FEED, WHOLE

MODELS_MOST = 62  # bits of a set
HORIZON_SHARE = 0.06
_UNIONS_MOST = 1024
TAGS_MOST = 62
_MILLI_PER_CPU = 1000
_LOG_PER_NODE = 4  # a kind that is asked for once in so many changes per node weighs everything anew
_LOG_LEAST = 1024


class ExpectedMix(NamedTuple):
    """The typical mix, class by class and as groups of classes."""

    groups: Ints  # (F, 3 + M, Q)
    weight: Ints  # (F, L, Q)
    levels: Ints  # (2, ...)
    total: int  # of the weights of all classes
    scale: float  # what F is divided by
    classes: Floats  # (3, C)
    wanted: Floats  # (M + 1, C)
    captive: Ints  # (4, ...)
    mean: tuple[float, float]  # milli-GPU and milli-CPU of a task


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


def build_kinds(cpu_milli: Ints, memory: Ints, gpu_count: Ints, gpu_milli: Ints, models: Ints) -> Ints:
    """The table of kinds (K, 7) from its columns (K,); models are bits."""
    table = np.empty((len(cpu_milli), KIND_COLUMNS), np.int64)
    for column, values in enumerate(
        (cpu_milli, memory, gpu_count, gpu_milli, models, encode_task_sorts(gpu_count, gpu_milli))
    ):
        table[:, column] = values
    table[:, READ] = NEVER
    return table


def build_shapes(capacity: Ints, model: Ints) -> tuple[Ints, list[int]]:
    """The table of shapes (P, 4 + G) from CPU (P,) and the model of each slot (P, G), -1 for none; and the families."""
    if int(model.max(initial=-1)) >= MODELS_MOST:
        raise ValueError(f"there are {int(model.max()) + 1} GPU models; a fleet may have {MODELS_MOST}")
    models = [sum(1 << each for each in set(row) if each >= 0) for row in model.tolist()]
    families = sorted(set(models))
    family = [families.index(each) for each in models]
    columns = (capacity, np.array(models, np.int64), np.array(family, np.int64), (model >= 0).sum(axis=1), model)
    return np.ascontiguousarray(np.column_stack(columns), np.int64), families


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
    sizes = np.unique(mix.cpu_milli).astype(np.int64)
    quick = np.arange(1 + int(sizes.max(initial=0)) // _MILLI_PER_CPU) * _MILLI_PER_CPU
    levels = np.full((2, max(len(sizes) + 1, len(quick))), np.iinfo(np.int64).max)
    levels[0, : len(sizes)] = sizes
    reached = np.searchsorted(sizes, quick, side="right")
    levels[1] = reached[-1]
    levels[1, : len(quick)] = reached
    every = [[model for model in range(mix.allows.shape[0]) if family >> model & 1] for family in families]
    found = [_groups(mix, models) for models in every]
    widest = max([1, *map(len, found)])
    groups = np.zeros((len(families), GROUP_ALLOWS + max(1, mix.allows.shape[0]), widest), np.int64)
    weight = np.zeros((len(families), len(sizes) + 1, widest), np.int64)
    for family, models in enumerate(every):
        groups[family, GROUPS, 0] = len(found[family])
        for q, (key, classes) in enumerate(found[family].items()):
            groups[family, GROUP_COUNT, q], groups[family, GROUP_MILLI, q] = key[:2]
            for model, allowed in zip(models, key[2:], strict=True):
                groups[family, GROUP_ALLOWS + model, q] = allowed
            for t in classes:
                weight[family, int(np.searchsorted(sizes, mix.cpu_milli[t])) + 1 :, q] += mix.weight[t]
    return ExpectedMix(
        groups,
        weight,
        levels,
        int(np.sum(mix.weight)),
        mix.total * float(WHOLE),
        *_classes(mix),
        _captive(mix),
        _mean(mix),
    )


def _classes(mix: Mix) -> tuple[Floats, Floats]:
    """The table of classes, and the weight of each where nodes of a model can serve it."""
    beside = np.where(mix.gpu_count == 0, 0, np.where(mix.gpu_count > 1, SEVERAL, mix.gpu_milli))
    classes = np.array([mix.cpu_milli, mix.gpu_count, beside], np.float64)
    cpu_only = mix.gpu_count == 0
    wanted = np.where(np.vstack([mix.allows != 0, np.zeros_like(cpu_only)[None]]) | cpu_only, mix.weight, 0)
    return classes, np.ascontiguousarray(wanted, np.float64)


def _captive(mix: Mix) -> Ints:
    """See `peer_arrays`: unions of the sets of models that classes may use, those sets, what they ask for, weights."""
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
    captive = np.zeros((4, 1 + max(len(unions), len(mix.weight))), np.int64)
    for row, first, rest in ((0, len(unions), unions), (1, len(asked), sorted(asked))):
        captive[row, 0], captive[row, 1 : 1 + len(rest)] = first, rest
    captive[2, 0], captive[2, 1 : 1 + len(asked)] = sum(asked.values()), [asked[each] for each in sorted(asked)]
    captive[3, : len(mix.weight)] = mix.weight
    return captive


def _mean(mix: Mix) -> tuple[float, float]:
    total = max(1, int(np.sum(mix.weight)))
    gpu = float(np.sum(mix.weight * mix.gpu_count * mix.gpu_milli)) / total
    return gpu, float(np.sum(mix.weight * mix.cpu_milli)) / total


def fill_fleet_facts(facts: Ints, shapes: Ints, mean: tuple[float, float]) -> None:
    """Put into facts what follows from the shapes of all nodes (N, 4 + G): their GPUs, and how far ahead to look."""
    gpu, cpu = mean
    gpu_milli, cpu_milli = int(shapes[:, WIDTH].sum()) * WHOLE, int(shapes[:, CAPACITY].sum())
    tasks = gpu_milli / gpu if gpu and gpu_milli else cpu_milli / cpu if cpu else 0.0
    facts[CAPACITY_MILLI], facts[HORIZON] = gpu_milli, max(1, round(HORIZON_SHARE * tasks))


def _random_seed(rank: Ints) -> int:
    """The only draw that a run is given: RANDOM's go by the order of the nodes."""
    seed = 0
    for place in rank.tolist():
        seed = (seed * 1_000_003 + place + 1) % (1 << 32)
    return seed


def _nodes(shape: Ints, rank: Ints, memory: Ints) -> Ints:
    nodes = np.zeros((len(shape), NODE_COLUMNS), np.int64)
    nodes[:, NODE_SHAPE], nodes[:, RANK], nodes[:, MEMORY] = shape, rank, memory
    for column in (STATE, LEFT, RIGHT):
        nodes[:, column] = -1
    return nodes


def build_engine(
    shapes: tuple[Ints, Floats],
    kinds: Ints,
    expected: ExpectedMix,
    nodes: tuple[Ints, Ints, Ints],
    policy: int,
    weights: Floats,
) -> EngineArrays:
    """A fleet whose nodes are in no state yet.

    shapes: the table and the watts added (P, G); nodes: shape, rank and free memory (N,). weights are (PWR, FGD) of
    MIX; one per term of EELGRID, and that of stranding in a full fleet; other policies take none.
    """
    rows, slots = len(nodes[0]), shapes[1].shape[1]
    rates = np.zeros((3, len(TERMS) + 1))
    rates[SCALE] = (1.0, expected.scale, FEED * float(WHOLE), max(1, expected.total), WHOLE, 1.0)
    rates[GIVEN, : len(weights)] = weights
    if len(weights) <= len(TERMS):  # stranding weighs the same at any load
        rates[GIVEN, len(TERMS)] = rates[GIVEN, 2]
    rates[WEIGHTS] = rates[GIVEN]
    facts = np.zeros(9, np.int64)
    facts[WEIGHT], facts[SEED], facts[SHIFTS] = expected.total, _random_seed(nodes[1]), -1
    fill_fleet_facts(facts, shapes[0][nodes[0]], expected.mean)
    states = np.zeros((rows, GPU + 2 * slots + 2 * expected.groups.shape[2]), np.int64)
    states[:, ROOT] = -1
    blocks = (rows + BLOCK - 1) // BLOCK
    return EngineArrays(
        nodes=_nodes(*nodes),
        states=states,
        shapes=shapes[0],
        added_w=shapes[1],
        kinds=kinds,
        groups=expected.groups,
        weight=expected.weight,
        levels=expected.levels,
        classes=expected.classes,
        wanted=expected.wanted,
        offers=np.zeros(expected.classes.shape[1]),
        relief=np.zeros((3, expected.wanted.shape[0], expected.weight.shape[1])),
        captive=expected.captive,
        rates=rates,
        facts=facts,
        held=np.zeros((rows, TAGS_MOST if policy == GPU_CLUSTERING else 0), np.int64),
        bucket=np.full(1 << (2 * rows).bit_length(), -1, np.int64),
        spare=np.zeros(rows, np.int64),
        log=np.zeros(1 << max(_LOG_LEAST, _LOG_PER_NODE * rows).bit_length(), np.int64),
        cost=np.zeros((len(kinds), rows)),
        known=np.zeros((len(kinds), rows), np.uint8),
        loose=np.zeros(len(kinds)),
        rank=np.zeros((len(kinds), rows), np.int32),
        scaled=np.zeros((len(kinds), rows if is_scaled(policy, rates[WEIGHTS]) else 0)),
        top=np.zeros((len(kinds), blocks), np.int32),
        top_cost=np.zeros((len(kinds), blocks)),
        gpu=np.zeros(slots, np.int64),
        taken=np.full(slots, -1, np.int64),
        power_w=np.zeros(1),
        policy=policy,
    )
