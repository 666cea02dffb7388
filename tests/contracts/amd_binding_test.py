"""The stand-in for AMD's binding against the binding's own sources: names, parameters, keys of answers, status codes.

The binding cannot be imported without ROCm's library, so its sources are read.
"""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from tests.simulated_amdsmi import AmdHandle, SimulatedAmdSmi

from eelgrid_agent.devices.amd import session
from eelgrid_agent.devices.amd.session import load_binding
from eelgrid_agent.devices.port import DriverUnavailable

SPEC = importlib.util.find_spec("amdsmi")
pytestmark = pytest.mark.skipif(SPEC is None, reason="the extra eelgrid[amd] is not installed")
HANDLES = {"src": "processor_handle_src", "dst": "processor_handle_dst"}
CALLS = sorted(name for name in vars(SimulatedAmdSmi) if name.startswith("amdsmi_"))


def source(name):
    (folder,) = SPEC.submodule_search_locations
    return (Path(folder) / name).read_text()


@pytest.fixture(scope="module")
def functions():
    tree = ast.parse(source("amdsmi_interface.py"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_bindings_name_and_parameters(name, functions):
    theirs = functions[name].args
    ours = list(inspect.signature(getattr(SimulatedAmdSmi, name)).parameters)[1:]
    least = len(theirs.args) - len(theirs.defaults)
    assert least <= len(ours) <= len(theirs.args)
    wanted = [f"processor_{one}" if one == "handle" else HANDLES.get(one, one) for one in ours]
    assert wanted == [argument.arg for argument in theirs.args][: len(ours)]


@pytest.mark.parametrize("name", [name for name in CALLS if "_get_" in name or "_topo_" in name])
def test_the_keys_of_an_answer_are_the_bindings(name, functions):
    smi = SimulatedAmdSmi(2, monotonic_ns=lambda: 10**9)
    smi.amdsmi_init()
    smi.processes[0] = [(1, 2)]
    one, other = smi.amdsmi_get_processor_handles()
    arguments = {
        "amdsmi_get_clock_info": (one, smi.AmdSmiClkType.GFX),
        "amdsmi_get_temp_metric": (one, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT),
        "amdsmi_topo_get_link_type": (one, other),
        "amdsmi_get_processor_handles": (),
        "amdsmi_get_lib_version": (),
    }.get(name, (one,))
    words = {node.value for node in ast.walk(functions[name]) if isinstance(node, ast.Constant)}
    if name == "amdsmi_get_gpu_bad_page_info":
        words |= {node.value for node in ast.walk(functions["_format_bad_page_info"]) if isinstance(node, ast.Constant)}
    assert keys(getattr(smi, name)(*arguments)) <= words


def keys(answer):
    if isinstance(answer, dict):
        return set(answer).union(*map(keys, answer.values()))
    if isinstance(answer, list):
        return set().union(*map(keys, answer))
    assert isinstance(answer, int | float | str | AmdHandle)
    return set()


def test_enumerations_and_status_codes_are_the_bindings():
    interface, wrapper = source("amdsmi_interface.py"), source("amdsmi_wrapper.py")
    for name in ("AmdSmiClkType", "AmdSmiTemperatureType", "AmdSmiTemperatureMetric", "AmdSmiDevPerfLevel"):
        body = interface.partition(f"class {name}(IntEnum):")[2].partition("\n\n")[0]
        theirs = set(re.findall(r"^    (\w+) =", body, re.MULTILINE))
        assert set(getattr(SimulatedAmdSmi, name).__members__) <= theirs
    numbers = {name: int(number) for name, number in re.findall(r"^(AMDSMI_\w+) = (\d+)$", wrapper, re.MULTILINE)}
    for name, theirs in (
        ("INVALID", "INVAL"),
        ("NOT_SUPPORTED", "NOT_SUPPORTED"),
        ("NO_SYMBOL", "FAIL_LOAD_SYMBOL"),
        ("TIMEOUT", "TIMEOUT"),
        ("NO_PERMISSION", "NO_PERM"),
        ("OUT_OF_BOUNDS", "INPUT_OUT_OF_BOUNDS"),
        ("NO_DIRECTORY", "DIRECTORY_NOT_FOUND"),
        ("BUSY", "BUSY"),
        ("NOT_FOUND", "NOT_FOUND"),
        ("NOT_INITIALIZED", "NOT_INIT"),
        ("NOT_LOADED", "DRIVER_NOT_LOADED"),
        ("NO_DATA", "NO_DATA"),
        ("NO_DRIVER", "NO_DRV"),
        ("NO_FILE", "FILE_NOT_FOUND"),
        ("NO_SETTING", "SETTING_UNAVAILABLE"),
    ):
        assert getattr(session, name) == numbers[f"AMDSMI_STATUS_{theirs}"], name


def test_without_rocms_library_the_binding_says_what_to_install():
    if any(Path(folder, "libamd_smi.so").exists() for folder in ("/opt/rocm/lib", "/opt/rocm/lib64")):
        pytest.skip("ROCm's library is here")
    with pytest.raises(DriverUnavailable, match=r"amd-smi-lib and the extra eelgrid\[amd\]"):
        load_binding()
