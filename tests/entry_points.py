"""The project's programs without their scripts, which name an interpreter: for tests that start them elsewhere."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where the tests have the project's packages from.
PACKAGES = [Path(path) for path in sys.path if path and Path(path).is_relative_to(ROOT)]
_PROGRAMS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def build_entry_point(name):
    """The source that runs a program of this name, for `python -c`."""
    module, _, function = _PROGRAMS[name].partition(":")
    return f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"
