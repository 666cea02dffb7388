"""The house style is a test: sizes, names, docstrings, and words that do not belong here."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MOST, MODULE_LINES_MOST = 70, 800
DRAWERS = {"utils", "util", "helpers", "common", "misc", "base", "manager"}
# The lock files are long lists that a tool writes.
UNREAD = {"requirements.lock", "requirements-dev.lock"}


def _tracked() -> list[Path]:
    """Files of the project: what git knows or would take up; every file where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listing.stdout.split("\n") if listing.returncode == 0 else [str(p) for p in ROOT.rglob("*.py")]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


TRACKED = _tracked()
SOURCES = [path for path in TRACKED if path.suffix == ".py" and path.parent.name != "wire"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_module_is_small_and_says_what_it_owns(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert path.stem not in DRAWERS, "name the thing, not the drawer"
    assert text.count("\n") <= MODULE_LINES_MOST
    if text.strip():
        assert ast.get_docstring(tree), "a module says what it owns and what it must not know"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MOST, node.name


def test_no_mocks():
    pattern = re.compile(r"unittest\.mock|from mock|pytest_mock|monkeypatch\.setattr\(\s*[\"']")
    assert [_name(path) for path in SOURCES if path != Path(__file__) and pattern.search(path.read_text())] == []


def test_no_path_of_a_machine():
    """An absolute path that only the author's machine has helps nobody."""
    pattern = re.compile(r"(?<![A-Za-z0-9])/(?:work|farm|home/\w+|Users/\w+)/[A-Za-z.]")
    found = []
    for path in TRACKED:
        if path.name in UNREAD or path.suffix in {".png", ".svg"}:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{_name(path)}:{number}")
    assert found == []


def test_links_between_pages_lead_somewhere():
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
    broken = [
        f"{_name(path)} -> {target}"
        for path in TRACKED
        if path.suffix == ".md"
        for target in link.findall(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []
