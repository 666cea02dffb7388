"""`python -m bench.kernel_profile --out DIR`: what compiling every kernel costs, by function and by step, in CPU time.

A process with an empty cache compiles what `python -m eelgrid_kernels` does. Steps of numba are timed by its own events,
steps of LLVM where numba calls it; what a function waits for while another is compiled is the other's. Writes
`functions.csv` (function, variants, arguments, seconds of numba, seconds of LLVM) and `steps.csv`. The last line is the bound: all but what kernels themselves take,
numba's own functions and start, cannot be had for fewer or smaller kernels. Code that kernels share is optimised and made
machine code once, under the names `deciding` and `others`.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from bench.runner import Options, benchmark, report_promise
from bench.tables import format_table, write_csv

CPU_GOAL_S = 20.0
_SHOWN = 25
# Where numba calls LLVM, and what for.
_LLVM_STEPS = {
    "add_ir_module": "LLVM: reading",
    "_optimize_functions": "LLVM: each function",
    "_optimize_final_module": "LLVM: inlining and optimising",
    "finalize": "LLVM: linking",
    "link_parts": "LLVM: linking",
    "_finalize_specific": "LLVM: machine code",
}


class Stopwatch:
    """CPU seconds by function and step, each without those begun inside it."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._begun: list[list[float]] = []

    def begin(self) -> None:
        """Something begins, inside whatever has not ended."""
        self._begun.append([time.process_time(), 0.0])

    def end(self, function: str, step: str) -> None:
        """What began last has ended."""
        begun_s, inside_s = self._begun.pop()
        whole_s = time.process_time() - begun_s
        self.seconds[function, step] += whole_s - inside_s
        if self._begun:
            self._begun[-1][1] += whole_s


def _time_llvm(owner: Any, name: str, watch: Stopwatch) -> None:
    plain = vars(owner)[name]

    @functools.wraps(plain)
    def timed(library: Any, *args: Any) -> Any:
        watch.begin()
        try:
            return plain(library, *args)
        finally:
            watch.end(library.name, _LLVM_STEPS[name])

    setattr(owner, name, timed)


def measure_compilation() -> dict[str, Any]:
    """Compiles every kernel in this process, whose cache is empty; seconds by function and step, variants and arguments."""
    from numba.core import codegen, event

    from eelgrid_kernels.__main__ import collect_seldom

    collect_seldom()
    watch, variants, arguments = Stopwatch(), defaultdict[str, int](int), dict[str, int]()

    class Passes(event.Listener):  # type: ignore[misc]
        def on_start(self, _event: Any) -> None:
            watch.begin()

        def on_end(self, ended: Any) -> None:
            if ended.kind == "numba:compile":
                name = ended.data["dispatcher"].py_func.__qualname__
                variants[name] += 1
                arguments[name] = len(ended.data["args"])
                watch.end(name, "numba: the rest")
            else:
                watch.end(ended.data["qualname"], "numba: " + ended.data["name"].split()[0])

    for kind in ("numba:run_pass", "numba:compile"):
        event.register(kind, Passes())
    from eelgrid_kernels import compilation, shared_code, warmup

    libraries = (codegen.CPUCodeLibrary, codegen.JITCodeLibrary, shared_code.PartLibrary, shared_code.SharedLibrary)
    for owner in libraries:
        for name in _LLVM_STEPS.keys() & vars(owner).keys():
            _time_llvm(owner, name, watch)

    begun_s = time.process_time()
    warmup.warm_kernels()
    rows = [[function, step, seconds] for (function, step), seconds in watch.seconds.items()]
    modules = [module for name, module in sys.modules.items() if name.startswith(warmup.__package__ or "")]
    ours = {name for module in modules for name, one in vars(module).items() if isinstance(one, compilation.Kernel)}
    # What kernels share is made machine code in libraries of these names.
    ours |= {warmup.DECIDING, warmup.OTHERS}
    return {
        "start_s": begun_s,
        "whole_s": time.process_time() - begun_s,
        "rows": rows,
        "variants": variants,
        "arguments": arguments,
        "ours": sorted(ours),
    }


def _profile() -> dict[str, Any]:
    """What a process finds whose kernels were never compiled: what stands compiled beside the sources would be taken, too."""
    import eelgrid_kernels

    with tempfile.TemporaryDirectory() as folder:
        source = Path(eelgrid_kernels.__file__).parent
        shutil.copytree(source, Path(folder, source.name), ignore=shutil.ignore_patterns("__pycache__"))
        path = os.pathsep.join([folder, str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        code = "import json; from bench.kernel_profile import measure_compilation; print(json.dumps(measure_compilation()))"
        there = os.environ | {
            "NUMBA_CACHE_DIR": folder,
            "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",
            "PYTHONPATH": path,
        }
        done = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(done.stderr)
    profile: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return profile


@benchmark(out="bench-out/kernel-profile")
def main(options: Options) -> int:
    """Profiles the compilation of kernels."""
    profile, functions = _profile(), defaultdict[str, list[float]](lambda: [0.0, 0.0])
    steps = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    ours = set(profile["ours"])
    for function, step, seconds in profile["rows"]:
        functions[function][step.startswith("LLVM")] += seconds
        steps[step][function not in ours] += seconds
    table = [
        {
            "function": name,
            "whose": "ours" if name in ours else "numba's",
            "variants": profile["variants"].get(name, 1),
            "arguments": profile["arguments"].get(name, 0),
            "numba_s": round(numba_s, 3),
            "llvm_s": round(llvm_s, 3),
        }
        for name, (numba_s, llvm_s) in sorted(functions.items(), key=lambda pair: -sum(pair[1]))
    ]
    by_step = [
        {"step": name, "kernels_s": round(mine_s, 2), "numbas_own_s": round(own_s, 2)}
        for name, (mine_s, own_s) in sorted(steps.items(), key=lambda pair: -sum(pair[1]))
    ]
    write_csv(options.out / "functions.csv", None, table)
    write_csv(options.out / "steps.csv", None, by_step)
    print(format_table(None, table[:_SHOWN], 2))
    print(format_table(None, by_step[:_SHOWN], 1))
    kernels_s, own_s = (sum(pair[place] for pair in steps.values()) for place in (0, 1))
    whole_s = profile["start_s"] + profile["whole_s"]
    print(
        f"{whole_s:.1f} s: start {profile['start_s']:.1f}, {len(ours) - 2} kernels {kernels_s:.1f}, numba's own functions {own_s:.1f}, "
        f"else {profile['whole_s'] - kernels_s - own_s:.1f}"
    )
    return report_promise(f"at most {CPU_GOAL_S:g} s of processor", kept=whole_s <= CPU_GOAL_S)


if __name__ == "__main__":
    sys.exit(main())
