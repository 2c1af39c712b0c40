"""The folder of a run: written beside its place and renamed, so that it is whole or absent."""

import json
import os
import shutil
from pathlib import Path
from types import TracebackType

from torch import Tensor

from nerd_core.storage import check_writable, write_tensors

from .episode import EpisodeRecord

__all__ = ["OutputFolder", "write_episode"]


class OutputFolder:
    """A new results folder.

    Refuses an existing one, or a place that cannot be written, at once, before any work is done. As a context manager
    it gives a temporary sibling, which takes the folder's name when the block ends well and disappears otherwise.

    Args:
        path: The folder.

    Raises:
        ValueError: ``path`` exists, or its parent cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check()
        check_writable(path)
        self._partial = path.with_name(f".{path.name}-{os.getpid()}.partial")

    def _check(self) -> None:
        if self.path.exists() or self.path.is_symlink():
            raise ValueError(f"out: {self.path} exists, expected a new folder; a run is never overwritten")

    def __enter__(self) -> Path:
        self._partial.mkdir(parents=True)
        return self._partial

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        try:
            self._check()  # somebody else may have been faster
        except ValueError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise
        self._partial.rename(self.path)


def write_episode(record: EpisodeRecord, frames: Tensor | None, out: Path) -> None:
    """Write result.json, trajectory.safetensors, report.html and, with frames, climb.mp4 into a folder.

    Args:
        record: The episode.
        frames: Rendered frames, shape (F, H, W, 3), uint8; None for no video.
        out: Existing folder.
    """
    from .report import write_report
    from .video import write_video

    document = {"format_version": 1, **record.settings, **record.summary}
    (out / "result.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    tensors = {
        "state": record.states,
        "control": record.controls,
        "planning_ms": record.planning_ms,
        "reward": record.reward,
        "score": record.score,
        "feet_on_deck": record.feet_on_deck,
        **{f"on_plan_error_{h}": v for h, v in record.on_plan_error.items()},
    }
    write_tensors(out / "trajectory.safetensors", {k: v.contiguous() for k, v in tensors.items()})
    video = None
    if frames is not None:
        video = "climb.mp4"
        write_video(out / video, frames, fps=25)
    write_report(record, frames, out, video=video)
