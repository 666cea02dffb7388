"""Explanations as short rows: what the journal and a checkpoint keep of why work stands where it stands.

Owns the shape of the rows and nothing else. Every placement keeps the
alternatives it beat; written out field by field, that is most of the journal
and half of the time that an event takes to become text.

    explanation  [row of a replica, ...]
    replica      [replica, feasible nodes, [constraint, nodes, ...], [term name, ...], [candidate, ...]]
    candidate    [node name, [GPU index, ...], cost in watts, [cost of each term in watts, ...]]
"""

from collections.abc import Sequence
from typing import Any

from eelgrid_protos.messages import Candidate, CostTerm, Removal, ReplicaExplanation

__all__ = ["explanation_from_rows", "explanation_rows"]


def explanation_rows(explanation: tuple[ReplicaExplanation, ...]) -> list[Any]:
    """The rows; all candidates of a replica have the same terms in the same order."""
    return [
        [
            found.replica,
            found.feasible_nodes,
            [part for removal in found.removals for part in (removal.constraint, removal.nodes)],
            [term.name for term in found.candidates[0].terms] if found.candidates else [],
            [
                [item.node_name, list(item.gpu_indexes), item.cost_w, [term.cost_w for term in item.terms]]
                for item in found.candidates
            ],
        ]
        for found in explanation
    ]


def explanation_from_rows(rows: Sequence[Any]) -> tuple[ReplicaExplanation, ...]:
    """The explanation; raises ValueError where the rows are none of ours."""
    try:
        return _read(rows)
    except (TypeError, IndexError) as error:
        raise ValueError(f"an explanation cannot be read: {error}") from error


def _read(rows: Sequence[Any]) -> tuple[ReplicaExplanation, ...]:
    return tuple(
        ReplicaExplanation(
            replica=replica,
            feasible_nodes=feasible,
            removals=tuple(
                Removal(constraint=constraint, nodes=nodes)
                for constraint, nodes in zip(removals[::2], removals[1::2], strict=True)
            ),
            candidates=tuple(
                Candidate(
                    node_name=node_name,
                    gpu_indexes=tuple(indexes),
                    cost_w=cost_w,
                    terms=tuple(
                        CostTerm(name=name, cost_w=term_w) for name, term_w in zip(names, terms_w, strict=True)
                    ),
                )
                for node_name, indexes, cost_w, terms_w in candidates
            ),
        )
        for replica, feasible, removals, names, candidates in rows
    )
