"""A kernel's cache goes by every source of the package, not by its own file alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import eelgrid_kernels
from eelgrid_kernels import compilation

SOURCE = Path(eelgrid_kernels.__file__).parent
ONE = '''"""One."""
from toy.compilation import kernel
from toy.other import twice, SHIFT
@kernel
def three(x):
    return twice(x) + x + SHIFT
'''
OTHER = '''"""Other."""
from toy.compilation import kernel
SHIFT = 0
@kernel
def twice(x):
    return 2 * x
'''
ASK = "from toy.one import three; print(three(10), sum(three.entry.stats.cache_hits.values()))"


@pytest.fixture
def toy(tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Toy."""\n')
    (folder / "one.py").write_text(ONE)
    (folder / "other.py").write_text(OTHER)
    shutil.copy(SOURCE / "compilation.py", folder)
    return folder


def ask(toy, **env):
    there = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA")}
    there |= {"PYTHONPATH": str(toy.parent), "HOME": str(toy.parent / "home"), **env}
    done = subprocess.run([sys.executable, "-c", ASK], env=there, capture_output=True, text=True, check=True)
    return done.stdout.split()


def folders(place):
    return sorted(path.name for path in place.glob("eelgrid-*"))


def test_an_edit_of_another_file_is_noticed(toy):
    assert ask(toy) == ["30", "0"]
    assert ask(toy) == ["30", "1"], "the second process loads what the first compiled"
    (toy / "other.py").write_text(OTHER.replace("2 * x", "5 * x").replace("SHIFT = 0", "SHIFT = 7"))
    assert ask(toy) == ["67", "0"]
    assert len(folders(toy / "__pycache__")) == 2


def test_the_user_may_say_where(toy):
    assert ask(toy, NUMBA_CACHE_DIR=str(toy.parent / "mine"))[0] == "30"
    assert len(folders(toy.parent / "mine")) == 1
    assert folders(toy / "__pycache__") == []


def test_where_nothing_can_be_written_kernels_still_work(toy):
    for name in ("__pycache__",):
        (toy / name).write_text("a file in the way")
    (toy.parent / "home").write_text("a file in the way")
    assert ask(toy) == ["30", "0"]
    assert ask(toy) == ["30", "0"]


def test_only_a_few_former_folders_stay(toy):
    for number in range(9):
        (toy / "__pycache__" / f"eelgrid-{number}").mkdir(parents=True)
    ask(toy)
    assert len(folders(toy / "__pycache__")) == 5


def test_numba_is_left_as_it_was():
    before = numba.config.CACHE_DIR
    compilation.kernel(lambda x: x)(1)
    assert before == numba.config.CACHE_DIR
