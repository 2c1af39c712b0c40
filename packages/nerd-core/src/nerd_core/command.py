"""How every command of the workspace ends: results on standard output, one plain line when the input is bad."""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import tyro

__all__ = ["BAD_INPUT", "INTERRUPTED", "leave", "print_json", "run_command", "say", "speaking_plainly"]

BAD_INPUT, INTERRUPTED = 2, 130


def say(line: str) -> None:
    """A line for the reader, on standard error; standard output stays free for results."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def leave(program: str, code: int, line: str) -> NoReturn:
    """End the program with one line and an exit code."""
    say(f"{program}: {line}")
    raise SystemExit(code)


def print_json(document: Any) -> None:
    """The last line on standard output: one JSON document, without NaN."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")


def speaking_plainly(program: str, run: Callable[[], None], *, hint: str = "interrupted") -> None:
    """Run a command; bad input becomes one line and exit code 2, an interrupt one line and 130.

    Args:
        program: Name that the line starts with.
        run: The command.
        hint: What to say when it was interrupted.
    """
    try:
        run()
    except (ValueError, OSError) as error:
        leave(program, BAD_INPUT, f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        leave(program, INTERRUPTED, hint)


def run_command(
    program: str, commands: Any, *, description: str, arguments: list[str] | None, hint: str = "interrupted"
) -> None:
    """Parse a command line into one of the subcommands' dataclasses and run it, speaking plainly.

    Args:
        program: Name of the script.
        commands: Union of dataclasses with a ``run`` method, annotated as tyro subcommands.
        description: Opens the help; holds a runnable example.
        arguments: Command line without the program's name; None for ``sys.argv``.
        hint: What to say when it was interrupted.
    """

    def run() -> None:
        _parse(program, commands, description, arguments).run()

    speaking_plainly(program, run, hint=hint)


def _parse(program: str, commands: Any, description: str, arguments: list[str] | None) -> Any:
    """The subcommand that a command line asks for; tyro's box about a wrong one becomes one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(commands, prog=program, description=description, args=arguments)
    except SystemExit as end:
        if end.code != BAD_INPUT:
            sys.stderr.write(box.getvalue())
            raise
        leave(program, BAD_INPUT, f"error: {_one_line(box.getvalue())}")


def _one_line(box: str) -> str:
    """What a box of tyro says, without its drawing and without the help texts of single arguments."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ ") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    paragraphs = [p.strip().split("\n") for p in re.split(r"\n[─-]{4,}\n", "\n".join(lines))]
    if "╭" not in text and len(paragraphs) > 1:  # a terminal without Unicode: the title is a paragraph
        paragraphs = paragraphs[1:]
    said = [" ".join(paragraphs[0])]
    for head, *rest in paragraphs[1:]:
        if head.startswith("Perhaps"):
            flags = dict.fromkeys(line.split()[0] for line in rest if line.startswith("--"))
            said.append(f"did you mean {' or '.join(flags)}?")
        elif not rest:
            said.append(head)
    return "; ".join(said)
