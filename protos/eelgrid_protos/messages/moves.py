"""Moves of running work, recommended and applied: mirrored by moves.proto."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.messages.workload import Candidate, GpuModel, Placement
from eelgrid_protos.quantities import (
    CostWatts,
    Count,
    CpuMilli,
    GpuMilli,
    Identifier,
    Label,
    Many,
    OpenEnum,
    Range,
    Ratio,
    Uint32,
    Uint64,
)

# Defaults of a request. A minute loads a model's weights again, or a checkpoint; an hour is about the least that a task
# of the public traces still runs once it has run for a while.
RESTART_S, HORIZON_S, MOVES_RATIO = 60.0, 3600.0, 0.05
MOVES_MOST = 10_000

# Weighted sums over a cluster; a gain may be a loss.
ClusterWatts = CostWatts
GoalWeight = Annotated[float, Range(0.0, 1e6)]
Gpus = Annotated[float, Range(0.0, 1e9)]
RestartSeconds = Annotated[float, Range(0.0, 86_400.0, "s")]
HorizonSeconds = Annotated[float, Range(1.0, 31_536_000.0, "s")]


class MoveGoal(OpenEnum):
    """What moves are to improve."""

    UNSPECIFIED = 0
    POWER = 1
    ROOM = 2
    BALANCED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalWeights:
    """The price of each term of the cost under a goal."""

    power: GoalWeight
    fragmentation_w: GoalWeight
    stranding_w: GoalWeight
    block_w: GoalWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMove:
    """One replica from its place to another; the candidates are its costs there and here."""

    source: Placement
    target: Placement
    candidates: Annotated[tuple[Candidate, ...], Many(2)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One step: replicas of one workload that move together."""

    workload_id: Identifier
    name: Label = ""
    replicas: Annotated[tuple[ReplicaMove, ...], Many(MOVES_MOST)]
    release_first: bool = False
    power_w: ClusterWatts = 0.0
    restart_w: ClusterWatts = 0.0
    gain_w: ClusterWatts = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFit:
    """How many more tasks of one class would fit at once."""

    cpu_milli: CpuMilli
    gpu_count: Count
    gpu_milli: GpuMilli
    gpu_models: Annotated[tuple[GpuModel, ...], Many(64)] = ()
    tasks: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The whole cluster before or after the moves, by the model."""

    power_w: ClusterWatts
    fragmented_gpus: Gpus
    stranded_gpus: Gpus
    cost_w: ClusterWatts
    typical_tasks: Uint32
    typical_gpu_milli: Uint64
    largest: Annotated[tuple[ClassFit, ...], Many(16)] = ()
    block_gpus: Gpus = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """An ordered sequence of moves, each feasible in its turn, and their gains."""

    recommendation_id: Identifier
    revision: Uint64
    goal: MoveGoal
    weights: GoalWeights
    moves: Annotated[tuple[Move, ...], Many(MOVES_MOST)] = ()
    before: Standing
    after: Standing
    gain_w: ClusterWatts
    restart_w: ClusterWatts
    running: Uint32
    movable: Uint32
    moving: Uint32
    moving_gpu_milli: Uint64
    moves_most: Uint32
    gpu_milli_most: Uint64
    restart_s: RestartSeconds
    horizon_s: HorizonSeconds
    typical_asked_tasks: Uint32
    typical_asked_gpu_milli: Uint64
    nodes_considered: Uint32


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendMovesRequest:
    """Asks for moves within a budget; omitted fields have defaults."""

    goal: MoveGoal = MoveGoal.UNSPECIFIED
    moves_most: Uint32 = 0
    moves_ratio: Ratio = 0.0
    gpu_ratio: Ratio = 0.0
    restart_s: RestartSeconds | None = None
    horizon_s: HorizonSeconds | None = None

    def violations(self) -> Iterator[Violation]:
        """Checks that the recommendation fits into one message."""
        if self.moves_most > MOVES_MOST:
            yield Violation("moves_most", f"is {self.moves_most}", f"ask for at most {MOVES_MOST} and repeat")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendMovesResponse:
    """The recommended moves."""

    recommendation: Recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyMovesRequest:
    """Names the recommendation to execute."""

    recommendation_id: Identifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyMovesResponse:
    """The moves that were made."""

    moved: Uint32
    revision: Uint64
    modelled_power_w: ClusterWatts
