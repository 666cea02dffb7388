"""Writes the dashboards as classic Grafana JSON into the chart.

Owns where they lie and how they are spelled. Must not know what is in them.

    python deploy/dashboards/render.py [--check]     exit code 1 where --check finds something stale
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.dashboards import budget, engine, fleet, node, workloads
from deploy.dashboards.panels import built
from grafana_foundation_sdk.cog.encoder import JSONEncoder

__all__ = ["FOLDER", "PAGES", "files", "main"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm" / "eelgrid" / "files" / "dashboards"
PAGES = (fleet.PAGE, node.PAGE, workloads.PAGE, engine.PAGE, budget.PAGE)


def files() -> Mapping[str, str]:
    """Each dashboard's file and its text."""
    found = {}
    for page in PAGES:
        value = json.loads(JSONEncoder(sort_keys=True).encode(built(page)))
        for link in value["links"]:
            # Newer Grafana would hide it in a menu, older ones do not know the word.
            link.pop("placement", None)
        found[f"{page.name}.json"] = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    return found


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; complain about what is stale")
    check = parser.parse_args(arguments).check
    wanted = files()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    stale = sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))
    if check:
        for name in stale:
            sys.stderr.write(f"{FOLDER.relative_to(ROOT) / name} is stale; run python deploy/dashboards/render.py\n")
        return 1 if stale else 0
    for name in stale:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
