"""A package of small kernels with a copy of the compiler's module, called in processes of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import eelgrid_kernels

SOURCE = Path(eelgrid_kernels.__file__).parent


def write_package(parent: Path, **modules: str) -> Path:
    """Writes the package `toy` with these modules; returns its folder."""
    folder = parent / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Toy."""\n')
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    shutil.copy(SOURCE / "compilation.py", folder)
    return folder


def run_code(package: Path, code: str, **env: str) -> str:
    """Runs code that may import the package, with an empty home beside it; returns what it prints."""
    there = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA")}
    there |= {"PYTHONPATH": f"{package.parent}:{SOURCE.parent}", "HOME": str(package.parent / "home"), **env}
    done = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
