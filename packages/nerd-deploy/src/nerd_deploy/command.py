"""How the command ends: results on standard output, one plain line when the input is bad.

``nerd_core.command`` does the same for the other packages, but loads torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from typing import Any

import tyro

__all__ = ["BAD_INPUT", "INTERRUPTED", "NOT_PASSED", "parse_command", "print_json", "say"]

NOT_PASSED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def say(line: str) -> None:
    """A line for the reader, on standard error; standard output stays free for results."""
    sys.stderr.write(line + "\n")


def print_json(document: Any) -> None:
    """The last line on standard output: one JSON document, without NaN."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def parse_command(program: str, commands: Any, description: str, arguments: list[str] | None) -> Any:
    """The command that a command line asks for; tyro's box about a wrong one becomes one line.

    Args:
        program: Name of the script.
        commands: Union of dataclasses, annotated as tyro subcommands.
        description: Opens the help; holds a runnable example.
        arguments: Command line without the program's name; None for ``sys.argv``.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(commands, prog=program, description=description, args=arguments)
    except SystemExit as end:
        if end.code == BAD_INPUT:
            text = re.sub(r"\x1b\[[0-9;]*m", "", box.getvalue())
            lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
            said = re.split(r"\n[─-]{4,}\n", "\n".join(lines))
            first = said[0 if "╭" in text or len(said) == 1 else 1]  # without Unicode the title comes first
            say(f"{program}: error: {' '.join(first.split())}; see {program} --help")
        raise
