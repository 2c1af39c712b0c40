#!/usr/bin/env python3
"""Keep ``uv.lock`` free of any package index: versions and hashes stay, hosts go.

    python scripts/lock.py                   resolve, then write the lock neutral (before a commit)
    python scripts/lock.py --check           fail if the lock to commit names a host or is stale
    python scripts/lock.py --restore         fill the lock in again with this machine's index
    python scripts/lock.py --install-filter  let git write it neutral at every `git add` here

A lock as uv writes it names the index and the address of every file, so it ties whoever clones the
repository to one machine's mirror. The neutral form is the same lock with three changes: every
registry source is ``{ registry = "pypi" }``, every ``url = ".../FILE"`` is ``path = "FILE"``, and
the workspace members' ``requires-dist`` lines are gone. The missing lines make uv resolve again at
the first ``uv sync`` or ``uv run``. Locked versions are then its preferences, so it fills in the
same versions with addresses of the user's own index. The hashes it takes from that index unseen,
which is why ``--check`` compares them with the committed ones.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "uv.lock"

Pins = dict[tuple[str, str], dict[str, str]]


def neutralise(text: str) -> str:
    """Return the lock without hosts. Neutral text comes back unchanged.

    Args:
        text: Content of ``uv.lock``, as uv wrote it or already neutral.

    Returns:
        The neutral lock.

    Raises:
        ValueError: If a host is left over, as from a git or a direct address dependency.
    """
    text = re.sub(r'\{ registry = "[^"]*"', '{ registry = "pypi"', text)
    text = re.sub(
        r'\{ url = "[^"?#]*/([^"/?#]+)[^"]*"',
        lambda match: f'{{ path = "{unquote(match[1])}"',
        text,
    )
    # An array ends at the first bracket that closes a line: those of extras have text behind them.
    text = re.sub(r"^requires-dist = \[.*?\]\n", "", text, flags=re.MULTILINE | re.DOTALL)
    if left := hosts(text):
        raise ValueError(f"uv.lock: expected sources from a registry only, got {', '.join(left)}")
    return text


def hosts(text: str) -> list[str]:
    """List the hosts that a lock names, each with its scheme."""
    return sorted(set(re.findall(r"\w+://[^/\"\s]*", text)))


def pins(text: str) -> Pins:
    """Read what a lock pins, in either form.

    Returns:
        For each (name, version) of a registry package, the hash of each of its files by file name.
    """
    found: Pins = {}
    for package in tomllib.loads(text)["package"]:
        if "registry" not in package["source"]:
            continue
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        found[package["name"], package["version"]] = {
            unquote(file.get("path") or file["url"].rpartition("/")[2]): file["hash"] for file in files
        }
    return found


def differences(committed: Pins, resolved: Pins) -> list[str]:
    """List versions that only one side pins and files whose hashes disagree.

    A file that only one side knows is no difference: an index may gain a wheel for another
    platform after the lock was written.
    """
    lines = [f"{name} {version}: only committed" for name, version in committed.keys() - resolved]
    lines += [f"{name} {version}: only resolved" for name, version in resolved.keys() - committed]
    for key in committed.keys() & resolved:
        for file in committed[key].keys() & resolved[key]:
            if committed[key][file] != resolved[key][file]:
                lines.append(f"{file}: committed {committed[key][file]}, got {resolved[key][file]}")
    return sorted(lines)


def staged_lock() -> str:
    """Return the lock that a commit would hold: git's staged one, else the file itself."""
    command = ["git", "-C", str(ROOT), "show", ":uv.lock"]
    shown = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return shown.stdout if shown and shown.returncode == 0 else LOCK.read_text()


def check() -> list[str]:
    """Return what is wrong with the staged lock, empty if nothing is."""
    staged = staged_lock()
    wrong = [f"names {host}" for host in hosts(staged)]
    return wrong + differences(pins(staged), pins(LOCK.read_text()))


def write(text: str) -> None:
    """Replace ``uv.lock`` in one step, so that no reader meets half of it."""
    part = LOCK.with_name("uv.lock.part")
    part.write_text(text)
    os.replace(part, LOCK)


def resolve() -> None:
    """Let uv bring ``uv.lock`` up to date; this fills a neutral lock in."""
    uv = [found] if (found := shutil.which("uv")) else [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "lock", "--directory", str(ROOT)], check=True)


def install_filter() -> None:
    """Give this clone a clean filter: ``git add`` and ``git status`` then see a neutral lock."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    git("config", "filter.neutral-lock.clean", "python3 scripts/lock.py --clean")
    attributes = ROOT / git("rev-parse", "--git-path", "info/attributes")
    attributes.parent.mkdir(exist_ok=True)
    lines = attributes.read_text().splitlines() if attributes.exists() else []
    rule = "/uv.lock filter=neutral-lock"
    if rule not in lines:
        attributes.write_text("\n".join([*lines, rule]) + "\n")


def main() -> int:
    """Run one mode; exit status 1 says that the lock is not fit to be committed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="check the staged lock, write nothing")
    mode.add_argument("--restore", action="store_true", help="fill the lock in, as `uv lock` does")
    mode.add_argument("--install-filter", action="store_true", help="neutralise at every git add")
    mode.add_argument("--clean", action="store_true", help="the filter: stdin to stdout")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            wrong = check()
            for line in wrong:
                print(f"uv.lock: {line}", file=sys.stderr)
            if wrong:
                print("run `python scripts/lock.py` and stage uv.lock", file=sys.stderr)
            return 1 if wrong else 0
        if arguments.clean:
            sys.stdout.write(neutralise(sys.stdin.read()))
        elif arguments.install_filter:
            install_filter()
        elif arguments.restore:
            resolve()
        else:
            resolve()
            write(neutralise(LOCK.read_text()))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
