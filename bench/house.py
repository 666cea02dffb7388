"""`python -m bench.house --out DIR`: Structure of the source: modules, names and imports, compared with their targets.

Parses the files without importing the product. Lines are lines of files, including comments and
docstrings; generated code (`eelgrid_protos/wire`) is left out everywhere. A module imports another if
any of its statements does, also inside a function. A circle is a strongly connected component of two or
more modules in that graph.

Writes `house.csv` (package, modules, median and 90th percentile of lines) and `summary.csv`
(measure, value, goal); exits with 1 if a goal is missed.
"""

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from bench.runner import Options, benchmark
from bench.tables import format_table, write_csv

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "agent": "eelgrid_agent",
    "client": "eelgrid",
    "controller": "eelgrid_controller",
    "kernels": "eelgrid_kernels",
    "protos": "eelgrid_protos",
}
FUNCTION_LINES_MOST = 70
# Verbs that say nothing about what they act on: as a whole name of a public function, or of a method, each is a riddle.
BARE_VERBS = frozenset(
    {
        "answer",
        "ask",
        "asked",
        "begin",
        "carried",
        "carry",
        "decide",
        "drop",
        "find",
        "forget",
        "gather",
        "give",
        "given",
        "go",
        "grant",
        "hear",
        "heard",
        "hold",
        "judge",
        "keep",
        "learn",
        "look",
        "make",
        "meet",
        "note",
        "notice",
        "offer",
        "order",
        "pay",
        "pick",
        "place",
        "reach",
        "read_off",
        "reckon",
        "remember",
        "said",
        "say",
        "see",
        "seen",
        "settle",
        "share",
        "show",
        "spend",
        "stand",
        "step",
        "take",
        "taken",
        "tell",
        "told",
        "try",
        "turn",
        "undo",
        "use",
        "wait",
        "want",
        "watch",
        "weigh",
        "wish",
        "word",
    }
)
MODULES_MOST, SINGLE_IMPORTER_MOST, SKIPS_MOST, LEVELS_MOST = 400, 60, 100, 6


@dataclass(frozen=True, slots=True)
class Module:
    """One file of Python."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def lines(self) -> int:
        """Lines of the file."""
        return self.text.count("\n")


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of the product below a checkout, by its dotted name."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if "wire" in parts:
                continue
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text()
            found[name] = Module(name, text, ast.parse(text), is_package)
    return found


def list_imports(module: Module, known: frozenset[str] | set[str]) -> set[str]:
    """The modules among `known` that any statement of this one imports."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return (found & known) - {module.name}


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others of the group."""
    names = sorted(imports)
    number = {name: place for place, name in enumerate(names)}
    pairs = [(number[one], number[other]) for one in names for other in imports[one]]
    if not pairs:
        return []
    rows, columns = np.array(pairs).T
    graph = csr_array((np.ones(len(pairs)), (rows, columns)), shape=(len(names), len(names)))
    _, labels = connected_components(graph, directed=True, connection="strong")
    members: dict[int, list[str]] = {}
    for name, label in zip(names, labels, strict=True):
        members.setdefault(int(label), []).append(name)
    return [group for group in members.values() if len(group) > 1]


def list_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Module-level functions and methods, with the name as it is read: `function` or `Class.method`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def count_lines(folder: Path) -> int:
    """Lines of all Python files below a folder."""
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py") if "wire" not in path.parts)


def count_levels(root: Path) -> int:
    """The levels of the controller's layers contract."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(
        len(contract["layers"])
        for contract in contracts
        if contract["type"] == "layers" and contract.get("containers") == ["eelgrid_controller"]
    )


def measure_house(root: Path) -> tuple[list[tuple[str, int, float, float]], list[tuple[str, float, float | None]]]:
    """Rows by package (modules, median and 90th percentile of lines), and measures with their goals (at most)."""
    modules = read_modules(root)
    known = set(modules)
    imports = {name: list_imports(module, known) for name, module in modules.items()}
    importers = Counter(other for found in imports.values() for other in found)
    packages = []
    for package in PACKAGES.values():
        lines = [m.lines for m in modules.values() if m.name.partition(".")[0] == package]
        packages.append((package, len(lines), statistics.median(lines), float(np.percentile(lines, 90))))
    classes = Counter(
        node.name
        for module in modules.values()
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    functions = [entry for module in modules.values() for entry in list_functions(module.tree)]
    # A command of click is named after its function: what people type.
    public = [
        name
        for name, node in functions
        if not name.rpartition(".")[2].startswith("_")
        and not any("command" in ast.unparse(one) for one in node.decorator_list)
    ]
    skips = sum(len(re.findall(r"#\s*fmt: skip", module.text)) for module in modules.values())
    long = sum(1 for _, node in functions if (node.end_lineno or node.lineno) - node.lineno >= FUNCTION_LINES_MOST)
    exported = sum("__all__ = " in m.text for m in modules.values() if not m.is_package)
    single = sum(importers[name] == 1 for name, module in modules.items() if not module.is_package)
    measures: list[tuple[str, float, float | None]] = [
        ("modules", len(modules), MODULES_MOST),
        ("circles", len(find_circles(imports)), 0),
        ("public_class_names_twice", sum(count > 1 for count in classes.values()), 0),
        ("bare_verb_functions", sum("." not in name and name in BARE_VERBS for name in public), 0),
        ("bare_verb_methods", sum("." in name and name.rpartition(".")[2] in BARE_VERBS for name in public), None),
        ("single_importer_modules", single, SINGLE_IMPORTER_MOST),
        ("fmt_skips", skips, SKIPS_MOST),
        ("modules_with_all", exported, 0),
        ("functions_over_70_lines", long, 0),
        ("controller_contract_levels", count_levels(root), LEVELS_MOST),
        ("product_lines", sum(module.lines for module in modules.values()), None),
        ("test_lines", count_lines(root / "tests"), None),
        ("bench_lines", count_lines(root / "bench"), None),
    ]
    return packages, measures


@benchmark()
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=ROOT,
    help="another checkout, for a comparison",
)
def main(options: Options) -> int:
    """Writes both tables and prints them."""
    packages, measures = measure_house(options.root)
    header = ("package", "modules", "lines_median", "lines_p90")
    write_csv(options.out / "house.csv", header, packages)
    rows = [(name, value, "" if goal is None else goal) for name, value, goal in measures]
    write_csv(options.out / "summary.csv", ("measure", "value", "goal_at_most"), rows)
    print(format_table(header, packages, 1))
    print(format_table(("measure", "value", "goal at most"), rows, 1))
    return int(any(goal is not None and value > goal for _, value, goal in measures))


if __name__ == "__main__":
    sys.exit(main())
