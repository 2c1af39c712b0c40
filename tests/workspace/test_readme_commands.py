"""Every command that the README shows exists, with the flags it is shown with."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = re.compile(r"nerd-(core|contact|coupling|mpc|deploy|rl)")


def bash_lines(markdown):
    """Command lines of all fenced bash blocks, continued lines joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()


def shown_commands(markdown):
    """Yield (script, subcommand or None, flags) of each of our commands in bash blocks.

    >>> list(shown_commands("```bash\\nuv run nerd-mpc climb --out a --seed=1  # why\\n```\\n"))
    [('nerd-mpc', 'climb', ['--out', '--seed'])]
    """
    for line in bash_lines(markdown):
        words = shlex.split(line.removeprefix("$ "), comments=True)
        # One line may chain commands.
        for command in " ".join(words).replace("&&", ";").replace("|", ";").split(";"):
            words = command.split()
            start = next((i for i, word in enumerate(words) if SCRIPT.fullmatch(word)), None)
            # `uv add nerd-core` names a distribution, not a script.
            if start is None or {"add", "install", "--package", "--with"} & set(words[:start]):
                continue
            script, *rest = words[start:]
            name = rest[0] if rest and not rest[0].startswith("-") else None
            flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
            yield script, name, flags


def help_text(script, subcommand):
    path = Path(sys.executable).with_name(script)
    assert path.exists(), f"README shows `{script}`, which no package installs"
    command = [str(path), *([subcommand] if subcommand else []), "--help"]
    env = os.environ | {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"`{shlex.join(command[1:])}` of {script}: {done.stderr}"
    return done.stdout


def test_commands_are_read_out_of_a_readme():
    markdown = (
        "```bash\n"
        "uv add nerd-core\n"
        "uv sync && uv run nerd-mpc climb --seed=1 \\\n  --out 'runs/a b'  # about a minute\n"
        "$ nerd-core --help\n"
        "```\n"
        "```python\nnerd-core nothing --here\n```\n"
    )
    assert list(shown_commands(markdown)) == [
        ("nerd-mpc", "climb", ["--seed", "--out"]),
        ("nerd-core", None, ["--help"]),
    ]


def test_every_command_and_flag_in_the_readme_exists(root):
    readme = root / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    wanted = {}
    for script, subcommand, flags in shown_commands(readme.read_text()):
        wanted.setdefault((script, subcommand), set()).update(flags)
    assert wanted, "README.md shows none of our commands in a bash block"
    for (script, subcommand), flags in wanted.items():
        text = help_text(script, subcommand)
        missing = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)]
        assert missing == [], f"{script} {subcommand}"
