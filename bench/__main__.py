"""The benchmarks: `python -m bench` lists them, and `python -m bench --out DIR` runs those that make promises.

python -m bench                     what there is, a line each
python -m bench --out DIR           each of PROMISING in a process of its own; the exit status counts promises broken
python -m bench NAME [OPTIONS]      the same as python -m bench.NAME [OPTIONS]
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import click

FOLDER = Path(__file__).resolve().parent
PROMISING = ("start", "agent_overhead", "streams", "latency", "replay", "node")


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
    """Lists, runs one, or runs those that make promises."""
    known = list_benchmarks()
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__)
        width = max(map(len, known))
        for name, said in known.items():
            print(f"{'*' if name in PROMISING else ' '} {name:{width}}  {said}")
        print("\n* makes promises")
        return
    if arguments[0] in known:
        context.exit(_run(arguments[0], [*arguments[1:]]))
    if not arguments[0].startswith("--out"):
        raise click.UsageError(f"there is no benchmark {arguments[0]!r}; python -m bench lists them")
    broken = []
    for name in PROMISING:
        print(f"== {name}", flush=True)
        if _run(name, [*arguments]):
            broken.append(name)
    print(f"not kept: {', '.join(broken)}" if broken else "every promise kept")
    context.exit(len(broken))


if __name__ == "__main__":
    main()
