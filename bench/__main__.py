"""The benchmarks: `python -m bench` lists them, and `python -m bench --out DIR` runs those that have targets.

python -m bench                     one line per benchmark
python -m bench --out DIR           runs each of WITH_TARGETS in a separate process; the exit status counts missed targets
python -m bench NAME [OPTIONS]      the same as python -m bench.NAME [OPTIONS]
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import click

FOLDER = Path(__file__).resolve().parent
WITH_TARGETS = ("start", "agent_overhead", "streams", "latency", "replay", "node")


def list_benchmarks() -> dict[str, str]:
    """Every command by its name, with the first line of its docstring; none is imported."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n@benchmark(" in text:
            name = ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")
            said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[name] = re.sub(r"`python -m [^`]*`: |: `?python -m .*", "", said).rstrip(".:")
    return found


def _run(name: str, arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", f"bench.{name}", *arguments], check=False).returncode


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def main(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Lists the benchmarks, runs one, or runs those that have targets."""
    known = list_benchmarks()
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__)
        width = max(map(len, known))
        for name, said in known.items():
            print(f"{'*' if name in WITH_TARGETS else ' '} {name:{width}}  {said}")
        print("\n* has targets")
        return
    if arguments[0] in known:
        context.exit(_run(arguments[0], [*arguments[1:]]))
    if not arguments[0].startswith("--out"):
        raise click.UsageError(f"there is no benchmark {arguments[0]!r}; python -m bench lists them")
    broken = []
    for name in WITH_TARGETS:
        print(f"== {name}", flush=True)
        if _run(name, [*arguments]):
            broken.append(name)
    print(f"targets missed: {', '.join(broken)}" if broken else "all targets met")
    context.exit(len(broken))


if __name__ == "__main__":
    main()
