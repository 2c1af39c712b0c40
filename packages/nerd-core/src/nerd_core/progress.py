"""What a long run shows: a bar with rate and time left, or a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["RunProgress", "warn"]

PLAIN_INTERVAL = 10.0
"""Seconds between plain lines where standard error is not a terminal."""


def warn(line: str) -> None:
    """A line on standard error for what is no error."""
    sys.stderr.write(f"warning: {line}\n")
    sys.stderr.flush()


class RunProgress:
    """Progress on standard error; standard output stays free for results.

    Args:
        label: What is going on, one word or two.
        total: Number of updates.
        unit: What the rate counts, for example ``"frames"``.
        done: Updates that were done before, when resuming.
        shown: False for silence.
    """

    def __init__(self, label: str, total: int, *, unit: str, done: int = 0, shown: bool = True) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done, self._count = done, 0
        self._started = self._spoke = time.monotonic()
        self._first = done
        self._plain = shown and not sys.stderr.isatty()
        self._bar: Progress | None = None
        if shown and not self._plain:
            bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = bar.add_task(label, total=total, completed=done, note="")
            self._bar = bar

    def advance(self, count: int, note: str = "") -> None:
        """One update is done.

        Args:
            count: Units that it handled.
            note: Words to show, for example the loss.
        """
        self._done += 1
        self._count += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, note=f"{self._rate()} {note}")
            return
        now = time.monotonic()
        if self._plain and (now - self._spoke > PLAIN_INTERVAL or self._done == self._total):
            self._spoke = now
            left = (now - self._started) / (self._done - self._first) * (self._total - self._done)
            done = f"{self._label} {self._done}/{self._total} {self._rate()}"
            sys.stderr.write(f"{done} {note}, {left:.0f} s left\n")
            sys.stderr.flush()

    def _rate(self) -> str:
        return f"{self._count / max(time.monotonic() - self._started, 1e-9):,.0f} {self._unit}/s"

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar is not None:
            self._bar.stop()
