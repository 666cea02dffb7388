"""The stored explanations of placed replicas, by workload, as the text that the checkpoint holds.

A part of the cluster state. Must not know what an explanation says.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Self

from eelgrid_controller.state.events import EXPLAINED_REPLICAS_MOST
from eelgrid_controller.state.journal import decode_explanation, encode_explanation
from eelgrid_protos.messages import ReplicaExplanation


class ExplanationStore:
    """Stores the explanations of placements, by workload."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = dict(texts or {})

    def get(self, workload_id: str) -> tuple[ReplicaExplanation, ...]:
        """Returns the explanation; empty for a workload that is not placed."""
        text = self._texts.get(workload_id)
        return decode_explanation(json.loads(text)) if text else ()

    def put(self, workload_id: str, explained: tuple[ReplicaExplanation, ...], gone: Iterable[int] = ()) -> None:
        """Adds new explanations to those of replicas that stay."""
        left = set(gone) | {item.replica for item in explained}
        kept = [row for row in json.loads(self._texts.get(workload_id, "[]")) if row[0] not in left]
        rows = sorted([*kept, *encode_explanation(explained)])[:EXPLAINED_REPLICAS_MOST]
        self._texts[workload_id] = json.dumps(rows, separators=(",", ":"))

    def forget_workload(self, workload_id: str) -> None:
        """Removes a workload."""
        self._texts.pop(workload_id, None)

    def copy(self) -> Self:
        """Returns an independent copy."""
        return type(self)(self._texts)

    def dump(self) -> dict[str, str]:
        """Returns everything as plain values."""
        return dict(self._texts)
