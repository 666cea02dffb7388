"""Shared code: the machine code of several kernels and of all that they call, each function optimised once.

Owns the library of machine code and the file that keeps it. Must not know any kernel.

numba makes each function that Python calls a library of its own, which holds a copy of whatever it calls. Entries that
have most in common, as those of placement have, are compiled many times over by that. Here the parts of all entries,
and for each a wrapper that takes Python's objects apart, are linked into one library, which is optimised and made machine
code once.

What is used of numba beyond its documentation: a code library and its object cache, the wrapper, and the result of a
compilation that a dispatcher takes over. tests/unit/shared_code_test.py fails where another version of numba has other ones.
"""

import pickle
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from numba.core import codegen, serialize, targetconfig
from numba.core.compiler import CompileResult, Flags, compile_result
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target


class _NoEngine:
    """In place of the engine of machine code, which knows nothing of a part."""

    @staticmethod
    def set_env(_name: str, _env: Any) -> None:
        """The globals of a part live in its callers."""


class PartLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """The code of a part: linked into what calls it, never made machine code."""

    @property
    def codegen(self) -> _NoEngine:
        """Asked only for the place of the function's globals."""
        return _NoEngine()

    def _optimize_functions(self, ll_module: Any) -> None:
        """Left to whatever links it: shared code is optimised as a whole."""
        ll_module.data_layout = self._codegen._data_layout  # noqa: SLF001 (what numba does here besides)

    def finalize(self) -> None:
        """Ready to be linked, any number of times."""
        for function in self._final_module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"
        self._finalized = True

    @property
    def module(self) -> Any:
        """Its own code alone, as it was lowered."""
        self._ensure_finalized()
        return self._final_module

    @cached_property
    def optimized_module(self) -> Any:
        """Its own code alone, by the passes that numba's libraries have each function go through before they link it."""
        module = self.module.clone()
        super()._optimize_functions(module)
        return module

    def _get_module_for_linking(self) -> Any:
        """With all that it calls, for a library of numba's."""
        return self._linked_module

    @cached_property
    def _linked_module(self) -> Any:
        module = self.optimized_module.clone()
        _link_called(module, self._linking_libraries, lambda part: part.optimized_module)
        return module

    def get_pointer_to_function(self, _name: str) -> int:
        """There is none."""
        return 0


def _link_called(module: Any, libraries: Sequence[Any], find_module: Callable[[PartLibrary], Any]) -> None:
    """Links libraries into a module, and all that they call, each part once."""
    linked, pending = set(), [*libraries]
    while pending:
        library = pending.pop()
        if library in linked:
            continue
        linked.add(library)
        if isinstance(library, PartLibrary):
            module.link_in(find_module(library), preserve=True)
            pending += library._linking_libraries  # noqa: SLF001 (numba has no other way)
        else:  # numba's own have all that they call
            module.link_in(library._get_module_for_linking(), preserve=True)  # noqa: SLF001


class SharedLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """Machine code, compiled here or loaded."""

    @classmethod
    def load(cls, name: str, machine_code: bytes) -> "SharedLibrary":
        """Hands machine code to the engine, which compiles nothing then."""
        library = cls(cpu_target.target_context.codegen(), name)
        library.enable_object_caching()
        library._set_compiled_object(machine_code)
        library._finalize_final_module()
        return library

    @property
    def machine_code(self) -> bytes:
        """What `load` takes."""
        code: bytes = self._get_compiled_object()
        return code

    def link_parts(self, parts: Sequence[Any]) -> None:
        """Links parts and all that they call."""
        _link_called(self._final_module, parts, lambda part: part.module)

    def _optimize_final_module(self) -> None:
        """Once: what a cheap pass before prepares, the pruning of reference counts, most parts have none of."""
        passes, builder = self._codegen._module_pass_manager()  # noqa: SLF001 (numba has no other way)
        passes.run(self._final_module, builder)

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function of this library."""
        self._ensure_finalized()
        address: int = self._codegen._engine.get_function_address(name)  # noqa: SLF001 (numba has no other way)
        return address


class _Member(NamedTuple):
    """One kernel by one combination of types."""

    kernel: str
    description: Any  # numba's, of the function
    environment: Any
    signature: Any

    def build_result(self, library: SharedLibrary) -> CompileResult:
        """What a dispatcher takes over."""
        context = cpu_target.target_context
        return compile_result(
            typing_context=context.typing_context,
            target_context=context,
            library=library,
            environment=self.environment,
            entry_point=context.get_executable(library, self.description, self.environment),
            fndesc=self.description,
            signature=self.signature,
            objectmode=False,
            lifted=(),
            reload_init=[],
            referenced_envs=[],
        )


class SharedCode:
    """The machine code of several kernels."""

    def __init__(self, library: SharedLibrary, members: Sequence[_Member]) -> None:
        self._results: dict[str, list[CompileResult]] = {}
        for member in members:
            self._results.setdefault(member.kernel, []).append(member.build_result(library))

    def find_results(self, kernel: str) -> Sequence[CompileResult]:
        """What there is of a kernel, for its dispatcher."""
        return self._results.get(kernel, ())


@global_compiler_lock
def compile_shared(name: str, parts: Sequence[tuple[str, CompileResult, bool]], path: Path | None) -> SharedCode:
    """Makes machine code of parts, each with the name of its kernel and whether it gives up the interpreter's lock.

    It is kept in a file, if there is a path and it can be written.
    """
    library, members = SharedLibrary(cpu_target.target_context.codegen(), name), []
    library.enable_object_caching()
    for kernel, part, releases_lock in parts:
        with targetconfig.ConfigStack().enter(Flags()):
            part.target_context.create_cpython_wrapper(
                library, part.fndesc, part.environment, part.call_helper, release_gil=releases_lock
            )
        part.fndesc.typemap = part.fndesc.calltypes = None  # cannot be kept
        members.append(_Member(kernel, part.fndesc, part.environment, part.signature))
    library.link_parts([part.library for _, part, _ in parts])
    library.finalize()
    if path is not None and not library.has_dynamic_globals:
        with suppress(OSError):  # a full disk: the next process compiles anew
            _save(path, members, library.machine_code)
    return SharedCode(library, members)


def _save(path: Path, members: Sequence[_Member], machine_code: bytes) -> None:
    """Replaces the file whole; whoever may read the folder may read it."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}")
    try:
        with unfinished.open("wb") as file:
            file.write(pickle.dumps(frozenset(member.kernel for member in members)))
            file.write(serialize.dumps((members, machine_code)))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


_kept: dict[Path, frozenset[str]] = {}
_loaded: dict[Path, SharedCode] = {}


@global_compiler_lock
def load_results(paths: Iterable[Path], kernel: str) -> list[CompileResult]:
    """What these files keep of a kernel, for its dispatcher; each is loaded once, when one of its kernels is asked for."""
    results: list[CompileResult] = []
    for path in paths:
        if path in _loaded:
            results += _loaded[path].find_results(kernel)
        elif kernel not in _kept.get(path, (kernel,)):
            continue
        else:
            try:
                shared = _load_shared(path, kernel)
            except (EOFError, pickle.UnpicklingError, OSError):  # cut short by a crash of the machine: compiled anew
                _kept[path] = frozenset()
            else:
                results += () if shared is None else shared.find_results(kernel)
    return results


def _load_shared(path: Path, kernel: str) -> SharedCode | None:
    """Loads a file, if it keeps that kernel."""
    with path.open("rb") as file:
        _kept[path] = pickle.load(file)  # noqa: S301 (as trusted as what numba keeps beside it)
        if kernel not in _kept[path]:
            return None
        members, machine_code = pickle.load(file)  # noqa: S301
        cpu_target.target_context.refresh()  # what machine code calls is there then
        _loaded[path] = SharedCode(SharedLibrary.load(path.stem, machine_code), members)
        return _loaded[path]
