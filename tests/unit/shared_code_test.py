"""Kernels that share machine code: each function once, kept in one file, and whatever was not foreseen compiled by itself.

It fails where another version of numba has other code libraries, wrappers or results than shared_code.py uses.
"""

import pytest
from tests.kernel_package_rig import run_code, write_package

ONE = '''"""One."""
import numpy as np
from toy.compilation import lean_kernel, nogil_kernel
from toy.other import share
@lean_kernel
def add_shares(amounts, parts):
    total = 0
    for amount in amounts:
        total += share(amount, parts)
    return total
@nogil_kernel
def list_shares(amounts, parts):
    found = np.empty(amounts.shape[0], np.int64)
    for i in range(amounts.shape[0]):
        found[i] = share(amounts[i], parts)
    return found, add_shares(amounts, parts)
'''
OTHER = '''"""Other."""
from toy.compilation import kernel
@kernel
def share(amount, parts):
    return amount // parts
'''
# Of the three kernels that Python calls, two call the third, and one the other.
COMPILE = """
from toy.compilation import compile_together, mark_cache_complete
def run():
    share(7, 2)
    share(9, 3)
    add_shares(amounts, 2)
    list_shares(amounts, 2)
done = []
compile_together("all", (share, add_shares, list_shares), run, done.append)
mark_cache_complete()
print("compiled", len(done))
"""
ASK = """
print(share(7, 2), add_shares(amounts, 2), list_shares(amounts, 2)[0].tolist(), list_shares(amounts, 2)[1])
for call in (lambda: share(7, 0), lambda: list_shares(amounts, 0)):
    try:
        call()
    except ZeroDivisionError as error:
        print(error)
"""
ANSWERS = ["3 7 [2, 2, 3] 7", *["integer division by zero"] * 2]
LOADED_ONLY = """
for kernel in (share, add_shares, list_shares):
    kernel.entry.disable_compile()
"""


@pytest.fixture
def toy(tmp_path):
    return write_package(tmp_path, one=ONE, other=OTHER)


def ask(toy, *parts, **env):
    head = "import numpy as np\nfrom toy.one import add_shares, list_shares, share\namounts = np.array([4, 5, 6])"
    return run_code(toy, "\n".join((head, *parts)), **env).splitlines()


def kept(folder, pattern):
    return [path.name for path in folder.rglob(pattern)]


def test_one_file_has_the_machine_code_of_all_and_another_process_loads_it(toy):
    assert ask(toy, COMPILE, LOADED_ONLY, ASK) == ["compiled 3", *ANSWERS]
    (file,) = kept(toy, "*.nbl")
    assert file.startswith("all-")
    assert kept(toy, "*.nbc") == [], "none was compiled by itself"
    assert ask(toy, LOADED_ONLY, ASK) == ANSWERS
    assert ask(toy, COMPILE, ASK) == ["compiled 0", *ANSWERS], "nothing is compiled twice"


def test_types_that_were_not_foreseen_are_compiled_by_themselves(toy):
    ask(toy, COMPILE)
    assert ask(toy, "print(share(7.5, 2), share(7, 2))") == ["3.0 3"]
    assert len(kept(toy, "*.share-*.nbc")) == 1
    assert ask(toy, LOADED_ONLY, "print(add_shares(amounts, 2))") == ["7"]


def test_an_edit_of_another_file_is_noticed(toy):
    ask(toy, COMPILE)
    (toy / "other.py").write_text(OTHER.replace("amount // parts", "amount // parts + 1"))
    assert ask(toy, "print(add_shares(amounts, 2))") == ["10"]
    assert ask(toy, COMPILE, "print(add_shares(amounts, 2))") == ["compiled 3", "10"]
    assert len(kept(toy, "*.nbl")) == 2


def test_an_image_brings_the_file_along(toy):
    ask(toy, COMPILE)
    volume = toy.parent / "volume"
    assert ask(toy, LOADED_ONLY, ASK, NUMBA_CACHE_DIR=str(volume)) == ANSWERS
    assert len(kept(volume, "*.nbl")) == 1


def test_where_nothing_can_be_written_they_share_machine_code_in_memory(toy):
    (toy / "__pycache__").write_text("a file in the way")
    (toy.parent / "home").write_text("a file in the way")
    assert ask(toy, COMPILE, LOADED_ONLY, ASK) == ["compiled 3", *ANSWERS]


def test_where_calls_are_routed_elsewhere_each_is_compiled_by_itself(toy):
    routed = "from toy.compilation import route_calls\nroute_calls(lambda kernel, args: kernel.run_entry(args))"
    assert ask(toy, routed, COMPILE, ASK) == ["compiled 0", *ANSWERS]
    assert kept(toy, "*.nbl") == []


@pytest.mark.parametrize("left", [0, 40, 0.5])
def test_a_file_that_was_cut_short_is_made_anew(toy, left):
    ask(toy, COMPILE)
    (path,) = toy.rglob("*.nbl")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole)) if left < 1 else left])
    assert ask(toy, COMPILE, ASK) == ["compiled 3", *ANSWERS]
    assert ask(toy, LOADED_ONLY, ASK) == ANSWERS
