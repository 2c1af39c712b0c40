"""Moving and still pictures of an executed episode: ray-traced frames, a video, a film strip."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nerd_coupling.camera import RayCamera
from nerd_coupling.robots import Robot
from nerd_coupling.terrain import Terrain

__all__ = ["film_strip", "render_episode", "write_video"]

_CHUNK = 4  # states handed to the camera at once: how often progress is told
_STRIP_WIDTH = 400  # [pixels] of one frame in a film strip
_STRIP_GAP = 8  # [pixels]
_DPI = 100


def render_episode(
    robot: Robot,
    terrain: Terrain,
    states: Tensor,
    *,
    every: int = 2,
    width: int = 512,
    height: int = 288,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Pictures of every ``every``-th executed state, the first one included.

    Args:
        robot: The robot.
        terrain: What it climbs.
        states: Executed states, shape (D + 1, nq + nv).
        every: States per picture; 2 at 50 Hz gives a video of 25 frames per second.
        width: Width of a picture [pixels].
        height: Height of a picture [pixels].
        device: ``cpu`` or a CUDA device such as ``cuda:0``.
        progress: Called with the number of finished pictures and their total.

    Returns:
        RGB frames, shape (ceil((D + 1) / every), height, width, 3) uint8.

    Raises:
        ValueError: If ``every`` is not positive, there is no state, or a shape does not fit.
    """
    if every < 1:
        raise ValueError(f"every is {every}, expected at least 1")
    chosen = states[::every]
    if chosen.shape[0] == 0:
        raise ValueError("states is empty, expected at least one state")
    camera = RayCamera(robot, terrain, width=width, height=height, batch=_CHUNK, device=device)
    frames = []
    for part in chosen.split(_CHUNK):
        frames.append(camera.render(part))
        if progress is not None:
            progress(sum(len(f) for f in frames), len(chosen))
    return torch.cat(frames)


def write_video(path: str | Path, frames: Tensor, fps: float) -> None:
    """Write frames as an H.264 video in an MP4 file.

    Args:
        path: New file, ``*.mp4``.
        frames: RGB, shape (N, H, W, 3) uint8, H and W even, as H.264 in 4:2:0 needs.
        fps: Frames per second of playback.

    Raises:
        ValueError: If the file exists or is no ``.mp4``, or frames or fps do not fit.
    """
    path = Path(path)
    if path.suffix != ".mp4":
        raise ValueError(f"path is {path}, expected a name that ends in .mp4")
    if path.exists():
        raise ValueError(f"path: {path} exists; an artifact is never overwritten")
    _check_frames(frames)
    if frames.shape[1] % 2 or frames.shape[2] % 2:
        raise ValueError(f"frames are {tuple(frames.shape[1:3])}, expected even height and width")
    if not (math.isfinite(fps) and fps > 0.0):
        raise ValueError(f"fps is {fps}, expected a positive number")
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix tells the encoder the container, so the temporary mark goes before it.
    temporary = path.with_name(f"{path.stem}.tmp.mp4")
    try:
        writer: Any = imageio.get_writer(
            temporary,
            format="FFMPEG",  # pyright: ignore[reportArgumentType]
            fps=fps,
            codec="libx264",
            quality=8,
            pixelformat="yuv420p",
            macro_block_size=2,
            ffmpeg_log_level="error",
            # The index first, so that a browser starts to play before it has the whole file.
            output_params=["-movflags", "+faststart"],
        )
        with writer:
            for frame in frames.cpu().numpy():
                writer.append_data(frame)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def film_strip(
    frames: Tensor,
    times: Sequence[float],
    *,
    count: int = 6,
    captions: Sequence[str] | None = None,
) -> bytes:
    """A row of frames at evenly spaced times, the first and the last included, as a PNG.

    Args:
        frames: RGB, shape (N, H, W, 3) uint8.
        times: Time of each frame [s].
        count: Frames in the strip; fewer if there are fewer.
        captions: What to write below each frame of ``frames`` after its time.

    Returns:
        The PNG file's bytes.

    Raises:
        ValueError: If a shape or a length does not fit.
    """
    _check_frames(frames)
    total, rows, columns = frames.shape[:3]
    for name, values in (("times", times), ("captions", captions)):
        if values is not None and len(values) != total:
            raise ValueError(f"{name} has {len(values)} entries for {total} frames")
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1")
    chosen = _nearest(times, count)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Laid out in pixels, so that no frame is stretched or cut.
    width, height, below = _STRIP_WIDTH, round(_STRIP_WIDTH * rows / columns), 44
    full = len(chosen) * (width + _STRIP_GAP) - _STRIP_GAP
    figure = Figure(figsize=(full / _DPI, (height + below) / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    for place, index in enumerate(chosen):
        left = place * (width + _STRIP_GAP)
        axes = figure.add_axes((left / full, below / (height + below), width / full, height / (height + below)))
        axes.imshow(frames[index].cpu().numpy(), interpolation="antialiased", aspect="auto")
        axes.set_axis_off()
        caption = f"{times[index]:.2f} s"
        if captions is not None and captions[index]:
            caption += f"   {captions[index]}"
        figure.text(
            (left + 0.5 * width) / full,
            0.45 * below / (height + below),
            # A dollar sign would start a formula.
            caption.replace("$", r"\$"),
            ha="center",
            va="center",
            fontsize=17,
            color="#333333",
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _nearest(times: Sequence[float], count: int) -> list[int]:
    """Indices of the frames closest to ``count`` evenly spaced times, each once, in order."""
    first, last = times[0], times[-1]
    wanted = [first + (last - first) * i / max(1, count - 1) for i in range(count)]
    nearest = (min(range(len(times)), key=lambda i: abs(times[i] - time)) for time in wanted)
    return sorted(set(nearest))


def _check_frames(frames: Tensor) -> None:
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(
            f"frames are {frames.dtype} of shape {tuple(frames.shape)}, "
            "expected uint8 of shape (N, H, W, 3) with N at least 1"
        )
