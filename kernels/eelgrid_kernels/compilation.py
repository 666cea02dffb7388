"""Compilation of kernels: decorators, the two forms of a kernel, and the cache folder that all share.

Owns the decorators and the choice of a cache folder. Must not know any kernel.

A kernel has two forms. Called from Python it is an entry, machine code that the
cache keeps. Called from another kernel it is a part: LLVM IR that the entry
optimises together with its own. numba itself makes each function that another
calls a library of its own, optimises it with all that it calls, makes machine code
of that, and a wrapper that takes Python's objects apart: a function five calls deep
is compiled five times, and nobody calls four of them. Entries that are compiled
together (`compile_together`, as eelgrid_kernels.warmup has it done) share their parts
as well, in one library (eelgrid_kernels.shared_code); one that is called before, or
with other types, is compiled by itself.

Until machine code is there, a kernel may run as what it is, a function of Python's:
slower some hundred times, and equal to the bit. Whoever wants that routes calls
(`route_calls`); without a route, they run the entry.

Theory: numba looks at the source of the one file that a function stands in, so
its cache does not notice a change of what the function calls elsewhere. Here all
kernels share a folder named after the digest of every source file of the
package: an edit anywhere is a new folder, and functions may live in the file
where they belong. The folder is below NUMBA_CACHE_DIR where that is set, else in
the package's own __pycache__, else in the user's cache; if none can be written,
as in a read-only image without a home, kernels are compiled anew in each process:
slow to start, never stale. docs/adr/0015 has the why.

Portable kernels (EELGRID_PORTABLE_KERNELS, which our image sets) are compiled for every
processor of a kind instead of the one at hand. So an image brings them along in the
package's own folder, and a first start copies them to the folder it may write to.
"""

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import codegen, types
from numba.core.compiler import Compiler, CompileResult, Flags
from numba.core.compiler_machinery import PassManager
from numba.core.types.misc import unliteral

from eelgrid_kernels.array_tables import ArrayTable
from eelgrid_kernels.shared_code import PartLibrary, compile_shared, load_results

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PREFIX = "eelgrid-"
# Of sources that are no longer; each is some MiB. A process that still runs on one compiles in memory only.
_FORMER_MOST = 4
# The level of x86-64 that portable kernels are for, and what it has over the first as LLVM names it; source: the x86-64
# psABI, 3.1.1. Servers have had it since Haswell (2013) and Zen (2017).
_X86_LEVEL = "x86-64-v3"
_X86_LEVEL_FEATURES = (
    "cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3", "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt",
    "movbe", "xsave",
)  # fmt: skip


def choose_portable_processor(machine: str, features: Mapping[str, bool]) -> str | None:
    """Returns what portable kernels are compiled for, as LLVM names it; None where this processor is below it."""
    if machine in {"aarch64", "arm64"}:
        return "generic"
    has_level = machine == "x86_64" and all(features.get(name, False) for name in _X86_LEVEL_FEATURES)
    return _X86_LEVEL if has_level else None


def _select_processor() -> None:
    """Sets what numba compiles for, unless its own variables say so or it is to be this very processor."""
    wanted = os.environ.get("EELGRID_PORTABLE_KERNELS", "0") == "1"
    if wanted and numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        name = choose_portable_processor(platform.machine(), codegen.ll.get_host_cpu_features())
        if name is not None:
            numba.config.CPU_NAME, numba.config.CPU_FEATURES = name, ""


def _digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    taken = hashlib.sha256()
    for path in sources:
        taken.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return taken.hexdigest()[:24]


def _parents() -> Iterator[Path]:
    if os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(os.environ["NUMBA_CACHE_DIR"])
    yield Path(__file__).parent / "__pycache__"
    try:
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eelgrid"
    except RuntimeError:  # nobody's home
        return


def _holds(folder: Path) -> bool:
    """Whether something can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _changed_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another process was quicker
        return 0.0


def cache_folder() -> Path | None:
    """Where kernels of these sources are kept; None if nothing can be written. Drops what is too old."""
    name = _PREFIX + _digest()
    for parent in _parents():
        if not _holds(parent / name):
            continue
        former = sorted((path for path in parent.glob(_PREFIX + "*") if path.name != name), key=_changed_at)
        for path in former[:-_FORMER_MOST]:
            shutil.rmtree(path, ignore_errors=True)
        return parent / name
    return None


def _describe_target() -> str:
    """Names this processor and this numba."""
    name = numba.config.CPU_NAME or codegen.ll.get_host_cpu_name()
    features = numba.config.CPU_FEATURES
    target = repr((name, codegen.get_host_cpu_features() if features is None else features))
    version = f"{sys.implementation.cache_tag}-numba-{numba.__version__}"
    return f"{version}-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


def _marker(folder: Path) -> Path:
    """What says that every kernel was compiled for this processor by this numba."""
    return folder / f"complete-{_describe_target()}"


def _copy_shipped(folder: Path) -> None:
    """Copies the kernels that stand beside the sources, if all do, to a folder that has none.

    Machine code comes before the index that names it, and each file is replaced whole: nothing is broken whoever dies.
    """
    shipped = Path(__file__).parent / "__pycache__" / folder.name
    if shipped == folder or not _marker(shipped).exists() or any(folder.rglob("*.nb?")):
        return
    with suppress(OSError):  # a full disk: they are compiled, in memory
        for path in sorted(shipped.rglob("*.nb?"), key=lambda one: one.suffix == ".nbi"):
            target = folder / path.relative_to(shipped)
            target.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
                file.write(path.read_bytes())
            Path(file.name).replace(target)
        _marker(folder).touch()


def is_cache_complete() -> bool:
    """Whether every kernel can be loaded; True also where nothing can be kept, since no other process could help."""
    return _FOLDER is None or _marker(_FOLDER).exists()


def mark_cache_complete() -> None:
    """Notes that every kernel was compiled; a full disk costs the next start its time, and nothing else."""
    if _FOLDER is not None:
        with suppress(OSError):
            _marker(_FOLDER).touch()


_select_processor()
# Read at once: what is compiled later is of the sources that are imported now.
_FOLDER = cache_folder()
if _FOLDER is not None:
    _copy_shipped(_FOLDER)


class _InheritedFlags(Flags):  # type: ignore[misc]
    """What functions inherit that a kernel calls; one object for equal options, so that it is its own key.

    numba looks up each function that it tries for each operation by the caller's options, which all hash alike and are
    compared one by one: a tenth of its time.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@cache
def _build_inherited(nrt: bool, fastmath: frozenset[str]) -> _InheritedFlags:
    flags = _InheritedFlags()
    flags.nrt, flags.fastmath = nrt, set(fastmath)
    return flags


class _KernelFlags(Flags):  # type: ignore[misc]
    """The options of a kernel."""

    __slots__ = ()

    def copy(self) -> _InheritedFlags:
        """What numba has the functions inherit that the kernel calls; by itself also that they are inlined."""
        return _build_inherited(self.nrt, frozenset(self.fastmath.flags))


# Of numba's, for what no kernel has: `with`, closures, comprehensions, errors that are put together, functions that numba
# inlines, choices by literals, and expressions of whole arrays.
_NEEDLESS_PASSES = {
    "with_lifting", "inline_closure_likes", "Rewrite dynamic raises", "make_function_op_code_to_jit_function",
    "inline_inlinables", "find_literally", "literal_unroll", "LiteralPropagation", "inline_overloads", "nopython_rewrites",
}  # fmt: skip


class _KernelCompiler(Compiler):  # type: ignore[misc]
    def __init__(  # noqa: PLR0917 (numba's)
        self, typingctx: Any, targetctx: Any, library: Any, args: Any, return_type: Any, flags: Flags, locals_: Any
    ) -> None:
        super().__init__(typingctx, targetctx, library, args, return_type, _KernelFlags(flags), locals_)

    def define_pipelines(self) -> list[PassManager]:
        """Those of numba without passes that find nothing to do in a kernel, each of which looks at every statement."""
        found = []
        for pipeline in super().define_pipelines():
            shorter = PassManager(pipeline.pipeline_name)
            for each, description in pipeline.passes:
                if each.name() not in _NEEDLESS_PASSES:
                    shorter.add_pass(each, description)
            shorter.finalize()
            found.append(shorter)
        return found


class _PartCompiler(_KernelCompiler):
    def compile_extra(self, func: Callable[..., Any]) -> CompileResult:
        """Compiles a function as a part."""
        self.state.library = PartLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


class Kernel:
    """A function that compiles on its first call, or is loaded if these very sources were compiled before."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self.function, self._options = function, options

    def __call__(self, *args: Any) -> Any:
        """Runs the entry, or what the route of calls chooses."""
        return self.run_entry(args) if _route is None else _route(self, args)

    def run_entry(self, args: tuple[Any, ...]) -> Any:
        """Runs the entry, whatever the route."""
        return self.entry(*[arg.table if isinstance(arg, ArrayTable) else arg for arg in args])

    @cached_property
    def entry(self) -> Any:
        """The form for calls from Python: a dispatcher of numba's."""
        wanted = {"no_cfunc_wrapper": True, "pipeline_class": _KernelCompiler} | self._options
        if _FOLDER is None:
            return numba.njit(**wanted)(self.function)
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_FOLDER)
        try:  # numba reads the folder when it decorates
            dispatcher = numba.njit(cache=True, **wanted)(self.function)
        finally:
            numba.config.CACHE_DIR = before
        for result in load_results(_FOLDER.glob(f"*-{_describe_target()}.nbl"), self.name):
            dispatcher.add_overload(result)
        return dispatcher

    @property
    def name(self) -> str:
        """The function with its module."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def compile_part(self, types_of_args: tuple[types.Type, ...]) -> tuple[str, CompileResult, bool]:
        """Compiles what shared code is made of, for a call with these arguments."""
        self.part.compile(types_of_args)
        return self.name, self.part.overloads[types_of_args], self._options.get("nogil", False)

    @cached_property
    def part(self) -> Any:
        """The form for calls from other kernels: a dispatcher that Python cannot call."""
        wanted = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": _PartCompiler}
        dispatcher = numba.njit(**wanted, **self._options)(self.function)
        resolve = dispatcher.get_call_template

        def resolve_without_constants(args: Any, kws: Any) -> Any:
            """One version for an argument, whether it is a constant or not: numba compiles one for each constant."""
            plain = {name: unliteral(value) for name, value in dict(kws).items()}
            return resolve(tuple(unliteral(value) for value in args), plain)

        dispatcher.get_call_template = resolve_without_constants
        return dispatcher

    @property
    def _numba_type_(self) -> types.Dispatcher:
        """What numba asks for where another kernel calls this one; it keeps no dispatcher alive."""
        return types.Dispatcher(self.part)


_route: Callable[[Kernel, tuple[Any, ...]], Any] | None = None


def route_calls(route: Callable[[Kernel, tuple[Any, ...]], Any] | None) -> None:
    """Has calls from Python run by `route`, which chooses the entry or the function; by the entry again where it is None."""
    global _route  # noqa: PLW0603  # one for all kernels, which a call reads in some nanoseconds
    _route = route


def _record_calls(run: Callable[[], object]) -> list[tuple[Kernel, tuple[types.Type, ...]]]:
    """Runs calls interpreted; returns the kernels that they call from Python, with the types of the arguments, each once."""
    found: dict[tuple[Kernel, tuple[types.Type, ...]], None] = {}
    is_inside = False

    def record(called: Kernel, args: tuple[Any, ...]) -> Any:
        nonlocal is_inside
        if is_inside:
            return called.function(*args)
        found[called, tuple(numba.typeof(arg.table if isinstance(arg, ArrayTable) else arg) for arg in args)] = None
        is_inside = True
        try:
            # Machine code does not warn of a hash that wraps around.
            with np.errstate(all="ignore"):
                return called.function(*args)
        finally:
            is_inside = False

    route_calls(record)
    try:
        run()
    finally:
        route_calls(None)
    return list(found)


def compile_together(
    name: str, kernels: Iterable[Kernel], run: Callable[[], object], on_compiled: Callable[[int], None]
) -> None:
    """Compiles kernels for the calls of `run` into machine code that they share, where any of them was never compiled.

    Tells of each how many are done. No other thread calls kernels meanwhile. Does nothing while calls are routed elsewhere: then each kernel is compiled by its own.
    """
    if _route is not None or all(each.entry.overloads for each in kernels):
        return
    parts, calls = [], _record_calls(run)
    for called, types_of_args in calls:
        parts.append(called.compile_part(types_of_args))
        on_compiled(len(parts))
    path = None if _FOLDER is None else _FOLDER / f"{name}-{_describe_target()}.nbl"
    shared = compile_shared(name, parts, path)
    for called in dict.fromkeys(called for called, _ in calls):
        for result in shared.find_results(called.name):
            if tuple(result.signature.args) not in called.entry.overloads:
                called.entry.add_overload(result)


def kernel(function: _Function) -> _Function:
    """A kernel that may allocate arrays."""
    return _compile(function)


def lean_kernel(function: _Function) -> _Function:
    """A kernel that allocates nothing: nobody counts references to its arrays, which takes time there and in the compiler."""
    return _compile(function, _nrt=False)


def inlined_kernel(function: _Function) -> _Function:
    """A lean kernel whose code goes into that of its callers: for the small and hot, where handing over is what costs."""
    return _compile(function, forceinline=True, _nrt=False)


def kernel_sum(function: _Function) -> _Function:
    """A lean kernel that sums whole numbers in floats: exact in any order, so the compiler may choose the order."""
    return _compile(function, fastmath={"reassoc", "nsz"}, _nrt=False)


def kernel_least(function: _Function) -> _Function:
    """A lean kernel that takes the least of floats among which is no NaN, so that the compiler may compare several at once."""
    return _compile(function, fastmath={"nnan", "nsz"}, _nrt=False)


def nogil_kernel(function: _Function) -> _Function:
    """A kernel that gives up the interpreter's lock while it runs: for seconds of work in a thread of its own.

    Not for what takes microseconds: who gives the lock up may wait milliseconds to have it back.
    """
    return _compile(function, nogil=True)


def _compile(function: _Function, **options: Any) -> _Function:
    # Without its compiler numba leaves functions as they are, and so do we.
    return function if numba.config.DISABLE_JIT else cast("_Function", Kernel(function, options))
