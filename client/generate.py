"""Generates `eelgrid/client.py`, the blocking client, from `eelgrid/async_client.py`, or checks that it is fresh.

One class is written by hand, so the two clients cannot differ: the other is the same text without `async` and `await`,
with the names below replaced. The formatter sets the lines.

    python client/generate.py [--check]     exit code 1 where --check finds a stale file
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "eelgrid"
SOURCE, TARGET = FOLDER / "async_client.py", FOLDER / "client.py"
DOCSTRING = '''"""Client: every call of the operators' API as a typed method that blocks.

Generated from async_client.py by client/generate.py; do not edit.
"""
'''
# In this order.
REPLACEMENTS = (
    (r'\A""".*?"""\n', lambda _: DOCSTRING),
    (r"A connection to a controller, for asyncio;", "A connection to a controller, for any thread;"),
    (r"`\(await get_summary\(\)\)", "`get_summary()"),
    (r"import asyncio\n", "import time\n"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\baclosing\b", "closing"),
    (r"\bAsync(Client|Generator|Iterator)\b", r"\1"),
    (r"\bAsyncConnection\b", "BlockingConnection"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
)


def generate() -> str:
    """Returns the text of the blocking client."""
    text = SOURCE.read_text("utf-8")
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    if left := re.findall(r"\w*(?:async|await)\w*", text.replace("async_client.py", "")):
        raise SystemExit(f"{SOURCE.name}: the generator does not know what to do with {sorted(set(left))}")
    ruff = str(Path(sys.executable).parent / "ruff")
    for command in (("check", "--select", "I", "--fix", "--quiet"), ("format", "--quiet")):
        done = subprocess.run(  # noqa: S603
            [ruff, *command, "--stdin-filename", str(TARGET), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = done.stdout
    return text


def main() -> int:
    """Generates, or with --check compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    text = generate()
    if parser.parse_args().check:
        if not TARGET.is_file() or TARGET.read_text("utf-8") != text:
            print(f"stale: {TARGET}; run `python client/generate.py`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
