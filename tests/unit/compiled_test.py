"""A kernel's cache goes by every source of the package, not by its own file alone."""

import platform

import numba
import pytest
from llvmlite import binding
from tests.kernel_package_rig import run_code, write_package

from eelgrid_kernels import compilation

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
    return write_package(tmp_path, one=ONE, other=OTHER)


def ask(toy, code=ASK, **env):
    return run_code(toy, code, **env).split()


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


def ship(toy):
    """What the build of an image does: every kernel, portable, beside the sources; nothing may be written there later."""
    code = f"{ASK}; from toy.compilation import mark_cache_complete; mark_cache_complete()"
    assert ask(toy, code, EELGRID_PORTABLE_KERNELS="1") == ["30", "0"]


PORTABLE = pytest.mark.skipif(
    compilation.choose_portable_processor(platform.machine(), binding.get_host_cpu_features()) is None,
    reason="this processor compiles its own kernels",
)


@PORTABLE
def test_kernels_that_an_image_brings_along_are_copied_to_the_volume_and_loaded(toy):
    ship(toy)
    volume = {"NUMBA_CACHE_DIR": str(toy.parent / "volume")}
    assert ask(toy, EELGRID_PORTABLE_KERNELS="1", **volume) == ["30", "1"]
    complete = f"{ASK}; from toy.compilation import is_cache_complete; print(is_cache_complete())"
    assert ask(toy, complete, EELGRID_PORTABLE_KERNELS="1", **volume) == ["30", "1", "True"]
    assert ask(toy, complete, **volume) == ["30", "0", "False"], "those of this very processor are others"
    (toy / "other.py").write_text(OTHER.replace("2 * x", "5 * x"))
    assert ask(toy, EELGRID_PORTABLE_KERNELS="1", **volume) == ["60", "0"], "those of other sources are not copied"


@PORTABLE
def test_a_volume_that_has_kernels_keeps_its_own(toy):
    volume = {"NUMBA_CACHE_DIR": str(toy.parent / "volume")}
    assert ask(toy, **volume) == ["30", "0"]
    ship(toy)
    assert ask(toy, EELGRID_PORTABLE_KERNELS="1", **volume) == ["30", "0"]
    assert ask(toy, **volume) == ["30", "1"]


@PORTABLE
def test_numba_s_own_variables_come_first(toy):
    target = "from toy.compilation import numba; print(numba.config.CPU_NAME, repr(numba.config.CPU_FEATURES))"
    portable = compilation.choose_portable_processor(platform.machine(), binding.get_host_cpu_features())
    assert ask(toy, target, EELGRID_PORTABLE_KERNELS="1") == [portable, "''"]
    assert ask(toy, target, EELGRID_PORTABLE_KERNELS="1", NUMBA_CPU_NAME="x86-64") == ["x86-64", "None"]
    assert ask(toy, target, EELGRID_PORTABLE_KERNELS="0") == ["None", "None"]


def test_portable_kernels_are_for_processors_that_have_what_they_use():
    level = dict.fromkeys(compilation._X86_LEVEL_FEATURES, True)
    assert compilation.choose_portable_processor("x86_64", level | {"avx512f": False}) == "x86-64-v3"
    for lacking in level:
        assert compilation.choose_portable_processor("x86_64", level | {lacking: False}) is None, lacking
    assert compilation.choose_portable_processor("aarch64", {}) == "generic"
    assert compilation.choose_portable_processor("ppc64le", level) is None


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
