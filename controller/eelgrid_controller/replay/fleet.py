"""The trace's nodes as a fleet file, the input of `eelgrid-agent --simulate FILE`.

Owns the mapping from a node row to a node of the fleet file; must not know how
an agent reads it. Theory: products are the catalogue's `openb-*` entries, whose
watts are those of the published power model; the model name stays as the tasks
ask for it. A node is one entry, because its name is the trace's.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eelgrid_controller.replay.openb import NodeRow, TraceMalformed

__all__ = ["fleet", "product_key", "write_fleet"]


def product_key(model: str, products: Iterable[str]) -> str:
    """The catalogue's key of a model of the trace."""
    key = f"openb-{model.lower()}"
    known = sorted(product.removeprefix("openb-").upper() for product in products if product.startswith("openb-"))
    if key.removeprefix("openb-").upper() not in known:
        raise TraceMalformed(
            f"model {model!r}", "has no watts in the catalogue", f"use one of {', '.join(known)}, or add a product"
        )
    return key


def fleet(nodes: Iterable[NodeRow], products: Iterable[str]) -> Mapping[str, Any]:
    """The fleet file's content; raises TraceMalformed for a model that the catalogue lacks."""
    rows = tuple(nodes)
    keys = {model: product_key(model, products) for model in sorted({row.gpu_model for row in rows} - {""})}
    return {"nodes": [_entry(row, keys) for row in rows]}


def _entry(row: NodeRow, keys: Mapping[str, str]) -> Mapping[str, Any]:
    gpus = [{"product": keys[row.gpu_model], "model": row.gpu_model, "count": row.gpu_count}] if row.gpu_count else []
    return {
        "name": row.name,
        "count": 1,
        "cpu_milli": row.cpu_milli,
        "memory_bytes": row.memory_bytes,
        "pool": row.gpu_model.lower() or "cpu",
        "labels": {"trace": "openb"},
        "gpus": gpus,
    }


def write_fleet(path: Path, nodes: Iterable[NodeRow], products: Iterable[str]) -> None:
    """The fleet file at `path`."""
    path.write_text(json.dumps(fleet(nodes, products), indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
