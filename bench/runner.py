"""Runs a benchmark: options, header, progress, refusals and exit status, the same for every `python -m bench.X`.

Owns the options that several benchmarks share and the meaning of an exit status: 0, everything was measured and all
targets were met; 1, a target was missed; 2, refused, because the request cannot be carried out. A figure means little
without its machine, so a description of the machine precedes the results. Must not know what is measured.
"""

import inspect
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import click
import psutil

_PROGRESS_AFTER_S = 2.0  # shorter work needs no word
_PROGRESS_EVERY_S = 10.0  # where lines are kept, as in a log
_RENEWED_EVERY_S = 0.1  # where a terminal writes over its line

_Body = TypeVar("_Body", bound=Callable[..., Any])


class Unusable(ValueError):
    """What was asked for cannot be done; the message says what can."""


class Options(SimpleNamespace):
    """What was given on the command line, by the names of the options."""


def default_data() -> Path:
    """The folder with public data sets that EELGRID_DATA names."""
    return Path(os.environ.get("EELGRID_DATA", "../shared/data"))


def machine_facts() -> str:
    """Cores, memory, load and versions, in a line."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores ({len(os.sched_getaffinity(0))} usable, load {os.getloadavg()[0]:.1f}), "
        f"{memory_gib:.0f} GiB, {platform.system()} {platform.release()} {platform.machine()}, "
        f"Python {platform.python_version()}"
    )


class Progress:
    """Says on stderr how far long work is: a line that renews itself on a terminal, else a line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + _PROGRESS_AFTER_S
        self._is_terminal = sys.stderr.isatty()

    def show(self, done: int, total: int, note: str = "") -> None:
        """So many of all are done; says so if the last word is long enough ago."""
        now_s = time.monotonic()
        is_last = done >= total and now_s - self._begin_s >= _PROGRESS_AFTER_S
        if now_s < self._next_s and not is_last:
            return
        self._next_s = now_s + (_RENEWED_EVERY_S if self._is_terminal else _PROGRESS_EVERY_S)
        passed_s = now_s - self._begin_s
        left = f", about {passed_s * (total - done) / done:.0f} s left" if done and not is_last else ""
        text = f"{done:,}/{total:,} {self._what}{note and f', {note}'}, {passed_s:.0f} s{left}"
        if self._is_terminal:
            print(f"\r{text}\033[K", end="\n" if is_last else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def report_promise(what: str, *, kept: bool) -> int:
    """Prints whether a target is met; returns the exit status."""
    print(f"target ({what}): {'met' if kept else 'MISSED'}")
    return 0 if kept else 1


def split_names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names in a list with commas, each once; all that are known for `all`. Raises Unusable for any other."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == ("all",):
        return tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise Unusable(f"unknown: {', '.join(unknown) or 'nothing given'}; choose from {', '.join(known)}")
    return names


def split_numbers(text: str) -> list[float]:
    """The numbers in a list with commas. Raises Unusable for anything that is none above 0."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise Unusable(f"{text!r} is no list of numbers") from None
    if not found or min(found) <= 0.0:
        raise Unusable(f"{text!r}: write numbers above 0, with commas")
    return found


def data_option(below: str = "") -> Callable[[_Body], _Body]:
    """`--data`: a folder of public data sets, or one of them."""
    return click.option(
        "--data",
        type=click.Path(path_type=Path),
        default=lambda: default_data() / below,
        help="The folder with the data; by default the value of EELGRID_DATA.",
    )


def seeds_option(default: int, help_text: str = "How many seeds.") -> Callable[[_Body], _Body]:
    """`--seeds`: how many."""
    return click.option("--seeds", type=int, default=default, show_default=True, help=help_text)


processes_option = click.option(
    "--processes", type=int, default=lambda: len(os.sched_getaffinity(0)), help="By default one per usable core."
)
plots_option = click.option("--no-plots", is_flag=True, help="Tables only.")


def _run(body: Callable[..., int | None], options: Options, *more: Any) -> int:
    """Runs with the folder for results at hand; what is refused leaves none that was not there."""
    out: Path | None = getattr(options, "out", None)
    is_new = out is not None and not out.exists()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    try:
        return body(options, *more) or 0
    except BaseException:
        if out is not None and is_new:
            with suppress(OSError):  # not empty: what was written until now stays
                out.rmdir()
        raise


def benchmark(
    *, out: str | None = "bench-out", refused: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """Makes a command of a function that takes Options; its help is its module's docstring.

    The command takes a list of arguments, those of the process by default, and returns the exit status; what else it
    is called with is handed on. With `out` there is `--out`, and the folder is made. What is in `refused`, and
    Unusable, is said on stderr with the command's name, and the status is 2. A wrong option ends the process with 2.
    """

    def make(body: Callable[..., int | None]) -> Callable[..., int]:
        module = inspect.getmodule(body)
        path = Path(inspect.getfile(body)).relative_to(Path(__file__).resolve().parent.parent).with_suffix("")
        name = ".".join(path.parts).removesuffix(".__main__")
        params = list(reversed(getattr(body, "__click_params__", [])))
        if out is not None:
            folder = click.Path(path_type=Path)
            params.append(click.Option(["--out"], type=folder, default=out, show_default=True, help="For the results."))
        text = inspect.cleandoc(module.__doc__ or "") if module else ""
        text = "\n\n".join(f"\b\n{part}" for part in text.split("\n\n"))
        command = click.Command(
            name, params=params, help=text, callback=Options, context_settings={"show_default": True}
        )

        def main(arguments: Sequence[str] | None = None, *more: Any) -> int:
            given = None if arguments is None else list(arguments)
            try:
                options = command.main(given, prog_name=f"python -m {name}", standalone_mode=False)
                if not isinstance(options, Options):  # --help was shown
                    return 0
                print(f"# {name}: {machine_facts()}", flush=True)
                return _run(body, options, *more)
            except click.ClickException as wrong:
                wrong.show()
                raise SystemExit(2) from None
            except (Unusable, *refused) as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2

        main.__doc__ = body.__doc__
        return main

    return make
