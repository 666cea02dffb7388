"""Pages name files and classes that exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SPAN, FENCE = re.compile(r"`([^`\n]+)`"), re.compile(r"```.*?```", re.DOTALL)
CLASS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+")
# Names of Kubernetes, NVIDIA, Slurm and protobuf that no file of ours has.
FOREIGN = {
    "AcctGatherEnergy",
    "AdmissionGated",
    "AdmissionGatedBy",
    "GrpTRESMins",
    "ImagePullBackOff",
    "NaType",
    "NotReady",
    "PriorityBoost",
    "StateSaveLocation",
}


def _listing(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


@pytest.fixture(scope="module")
def files():
    return {"/" + name for name in _listing("ls-files", "--cached", "--others", "--exclude-standard") if name}


@pytest.fixture(scope="module")
def words():
    """Every word of the sources."""
    found: set[str] = set()
    for path in ("*.py", "*.proto", "*.yaml", "*.toml", "*.js", "*.json"):
        found.update(_listing("grep", "-hoE", "[A-Za-z_][A-Za-z0-9_]*", "--", path))
    return found


def _spans(page: Path) -> set[str]:
    return set(SPAN.findall(FENCE.sub("", page.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_what_a_page_names_is_there(page, files, words):
    spans = _spans(page)
    paths = {span for span in spans if re.fullmatch(r"[\w./-]+\.py", span)}
    assert {span for span in paths if not any(name.endswith("/" + span.lstrip("./")) for name in files)} == set()
    if "adr" not in page.parts:  # decisions are told in the words of their day
        classes = {part for span in spans if re.fullmatch(r"[\w.]+", span) for part in span.split(".")}
        assert {name for name in classes if CLASS.fullmatch(name)} - words - FOREIGN == set()


def test_every_rename_leads_to_a_module_and_a_name_that_are_there(files, words):
    """Whoever knows an old name finds today's: a later move changes the row, a removal takes it away."""
    rows = [line.split(",") for line in (ROOT / "docs/project/renames.csv").read_text().splitlines()[1:]]
    assert len(rows) > 3000
    modules = {re.sub(r"(/__init__)?\.py$", "", name) for name in files if name.endswith(".py")}

    def is_there(now: str) -> bool:
        path = "/" + now.replace(".", "/")
        return any(f"{folder}{path}" in modules for folder in ("", "/agent", "/controller", "/kernels", "/protos"))

    def is_known(kind: str, now: str) -> bool:
        if kind == "method":
            return now in words
        if kind == "module" or is_there(now):
            return is_there(now)
        module, _, name = now.rpartition(".")
        return name in words and (is_there(module) or is_there(module.rpartition(".")[0]))

    assert [row for row in rows if not is_known(row[0], row[2])] == []
