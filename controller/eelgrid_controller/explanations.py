"""Why placed work stands where it stands, kept small.

Owns the explanations of the first replicas of each workload, as text: a tenth of the
memory of the objects, and no work for the garbage collector. Must not know how they
were found.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Self

from eelgrid_controller.compact import explanation_from_rows, explanation_rows
from eelgrid_controller.events import EXPLAINED_REPLICAS_MOST
from eelgrid_protos.messages import ReplicaExplanation

__all__ = ["Explanations"]


class Explanations:
    """Explanations by workload."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = dict(texts or {})

    def of(self, workload_id: str) -> tuple[ReplicaExplanation, ...]:
        """What was weighed; nothing for a workload that is not placed."""
        text = self._texts.get(workload_id)
        return explanation_from_rows(json.loads(text)) if text else ()

    def put(self, workload_id: str, explained: tuple[ReplicaExplanation, ...], gone: Iterable[int] = ()) -> None:
        """Keeps new explanations beside those of replicas that stay."""
        left = set(gone) | {item.replica for item in explained}
        kept = [row for row in json.loads(self._texts.get(workload_id, "[]")) if row[0] not in left]
        rows = sorted([*kept, *explanation_rows(explained)])[:EXPLAINED_REPLICAS_MOST]
        self._texts[workload_id] = json.dumps(rows, separators=(",", ":"))

    def drop(self, workload_id: str) -> None:
        """Forgets a workload."""
        self._texts.pop(workload_id, None)

    def copy(self) -> Self:
        """Explanations that change apart from these."""
        return type(self)(self._texts)

    def dump(self) -> dict[str, str]:
        """Everything, as plain values."""
        return dict(self._texts)
