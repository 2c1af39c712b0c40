"""Recorded trajectories on disk: a manifest and safetensors shards.

Layout of a dataset folder, format version 1::

    manifest.json    what was recorded, on which robot, by which engine; every shard's SHA-256
    shard-00000.safetensors, shard-00001.safetensors, ...

Tensors of a shard with N trajectories of T model steps each (T is the same in every shard):

* ``state``   (N, T+1, nq+nv) float32: concat(qpos, qvel), MuJoCo order and units (m, rad, m/s,
  rad/s; quaternion w x y z; free-joint linear velocity in world axes, angular velocity in body
  axes).
* ``control`` (N, T, nu) float32: ``control[:, t]`` acts from ``state[:, t]`` to ``state[:, t+1]``.
* ``scene.<name>`` (N, ...): a static description of each trajectory's surroundings, any names.
  Floats are stored as float32, whole numbers and booleans as they come.

Keys of ``manifest.json``: ``format``, ``format_version``, ``complete``, ``robot``,
``robot_digest``, ``engine`` (name, version, solver settings), ``seed``, ``extra`` (the recorder's
own settings), ``versions``, ``shapes`` (per-row shape and dtype of every tensor), ``shards``
(``file``, ``rows``, ``bytes``, ``sha256``) and ``rejected`` (reason to count).

A dataset knows no architecture: record once, fit many.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .robot import RobotSpec
from .storage import (
    TEMPORARY_SUFFIX,
    as_json,
    check_writable,
    list_differences,
    read_json,
    readable,
    sha256_of,
    write_json,
    write_tensors,
)

FORMAT = "nerd-dataset"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SCENE_PREFIX = "scene."
ROW_GROUPS = "row_groups"
"""Key of the manifest's ``extra``: a number per trajectory; those of one number stay on one side of a split."""


class TrajectoryWriter:
    """Writes a dataset shard by shard; a kill at any moment loses at most the shard in hand.

    A shard is written under a temporary name, renamed, and only then listed in the manifest, which
    is itself replaced in one step. With ``resume=True`` an incomplete dataset is taken up again:
    temporary files and shards that the manifest does not list are deleted, and the caller goes on
    with shard number ``num_shards``. A recorder whose random numbers depend only on (seed, shard
    number) therefore writes the same bytes whether or not it was interrupted.

    Args:
        path: Dataset folder; created, must be empty or absent unless ``resume``.
        robot: The robot that was recorded; travels in the manifest.
        engine: Engine name, version and every setting that changes the motion. JSON values.
        seed: The recorder's seed.
        extra: Further settings of the recorder that must agree on resume. JSON values.
        resume: Go on with an incomplete dataset, or start one if there is none.

    Raises:
        ValueError: ``path`` holds something else, a complete dataset, or an incomplete one recorded
            with other settings (every difference is listed).
    """

    def __init__(
        self,
        path: str | Path,
        robot: RobotSpec,
        *,
        engine: Mapping[str, Any],
        seed: int,
        extra: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        self.path = Path(path)
        self.robot = robot
        check_seed(seed)
        self._pending_rejections: dict[str, int] = {}
        self._closed = False
        described = as_json(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "robot": robot.to_json(),
                "robot_digest": robot.digest(),
                "engine": dict(engine),
                "seed": seed,
                "extra": dict(extra or {}),
            }
        )
        if (self.path / MANIFEST).exists():
            self._manifest: dict[str, Any] = self._reopen(described, resume=resume)
            return
        if self.path.exists() and not _is_unused(self.path):
            raise ValueError(f"path: {self.path} exists and is not a dataset; choose a new folder")
        check_writable(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        versions = {"torch": torch.__version__}
        blank = {"complete": False, "shapes": {}, "shards": [], "rejected": {}}
        self._manifest = described | blank | {"versions": versions}
        write_json(self.path / MANIFEST, self._manifest)

    @property
    def num_shards(self) -> int:
        """Shards safely on disk; also the number of the next shard."""
        return len(self._manifest["shards"])

    @property
    def num_trajectories(self) -> int:
        """Trajectories safely on disk."""
        return sum(shard["rows"] for shard in self._manifest["shards"])

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected trajectories by reason, those of the shard in hand included."""
        return _add_counts(self._manifest["rejected"], self._pending_rejections)

    def reject(self, reason: str, count: int = 1) -> None:
        """Count trajectories that are left out of the shard in hand.

        The count enters the manifest with the next :meth:`append` or :meth:`close`, so that a
        resumed recorder, which records the interrupted shard again, does not count twice.
        """
        if count < 0:
            raise ValueError(f"count: got {count}, expected a number >= 0")
        if count:
            self._pending_rejections = _add_counts(self._pending_rejections, {reason: int(count)})

    def append(self, state: Tensor, control: Tensor, scene: Mapping[str, Tensor] | None = None) -> None:
        """Write one shard.

        Args:
            state: (N, T+1, nq+nv), units and order as in the module docstring. N may be 0.
            control: (N, T, nu); ``control[:, t]`` acts from ``state[:, t]`` to ``state[:, t+1]``.
            scene: Static surroundings per trajectory, each (N, ...).

        Raises:
            ValueError: Wrong shapes, non-finite numbers, other shapes than the shards before, or a
                writer that is closed.
        """
        if self._closed:
            raise ValueError(f"{self.path}: this writer is closed")
        tensors = {"state": state, "control": control}
        tensors |= {f"{SCENE_PREFIX}{name}": value for name, value in (scene or {}).items()}
        self._check_trajectories(state, control)
        rows = state.shape[0]
        stored: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if tensor.ndim == 0 or tensor.shape[0] != rows:
                raise ValueError(
                    f"{name}: got shape {tuple(tensor.shape)}, expected ({rows}, ...), one row per trajectory"
                )
            stored[name] = tensor.float() if tensor.is_floating_point() else tensor
            # Checked after the conversion: a float64 beyond float32 range turns into inf there.
            if stored[name].is_floating_point() and not bool(stored[name].isfinite().all()):
                raise ValueError(f"{name}: holds non-finite numbers; reject those trajectories first")
        shapes = {
            name: {
                "shape": list(tensor.shape[1:]),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor in stored.items()
        }
        if self._manifest["shapes"] and (gaps := list_differences(self._manifest["shapes"], shapes)):
            raise ValueError(f"append: differs from the shards before: {'; '.join(gaps)}")
        file = self.path / f"shard-{self.num_shards:05d}.safetensors"
        digest = write_tensors(file, stored)
        size = file.stat().st_size
        entry = {"file": file.name, "rows": rows, "bytes": size, "sha256": digest}
        self._commit(shapes=shapes, shards=[*self._manifest["shards"], entry])

    def close(self) -> None:
        """Mark the dataset complete; from now on it can be opened and no longer be written."""
        if self._closed:
            return
        if self.num_trajectories == 0:
            raise ValueError(f"{self.path}: a dataset needs at least one trajectory, nothing was appended")
        self._commit(complete=True)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Close on success; after an error leave the dataset incomplete, to be resumed."""
        if kind is None:
            self.close()

    def _check_trajectories(self, state: Tensor, control: Tensor) -> None:
        size, nu = self.robot.state_size, self.robot.nu
        if state.ndim != 3 or state.shape[1] < 2 or state.shape[2] != size:
            raise ValueError(f"state: got shape {tuple(state.shape)}, expected (N, T+1 >= 2, {size})")
        expected = (state.shape[0], state.shape[1] - 1, nu)
        if tuple(control.shape) != expected:
            raise ValueError(f"control: got shape {tuple(control.shape)}, expected {expected}")

    def _commit(self, **changes: Any) -> None:
        manifest = self._manifest | changes | {"rejected": self.rejected}
        write_json(self.path / MANIFEST, manifest)
        self._manifest = manifest
        self._pending_rejections = {}

    def _reopen(self, described: dict[str, Any], *, resume: bool) -> dict[str, Any]:
        manifest = read_json(self.path / MANIFEST, what="dataset manifest")
        if manifest.get("format") != FORMAT:
            raise ValueError(f"path: {self.path} exists and is not a dataset; choose a new folder")
        if manifest.get("complete"):
            raise ValueError(f"path: {self.path} is a complete dataset; it is never overwritten")
        if not resume:
            raise ValueError(f"path: {self.path} is an incomplete dataset; pass resume to go on with it")
        gaps = list_differences({key: manifest.get(key) for key in described}, described)
        if gaps:
            raise ValueError(f"{self.path}: cannot resume, it was started with {'; '.join(gaps)}")
        listed = {shard["file"] for shard in manifest["shards"]}
        for file in self.path.iterdir():
            leftover = file.name.startswith("shard-") and file.name not in listed
            if leftover or file.name.endswith(TEMPORARY_SUFFIX):
                file.unlink()
        _check_shards(self.path, manifest["shards"], hashes=False)
        return manifest


class Trajectories(NamedTuple):
    """A dataset in memory.

    Attributes:
        states: (N, T+1, nq+nv) float32, as stored.
        controls: (N, T, nu) float32; ``controls[:, t]`` acts from frame t to frame t+1.
        scenes: Name to (N, ...) tensors.
    """

    states: Tensor
    controls: Tensor
    scenes: dict[str, Tensor]

    def select(self, rows: Tensor, device: torch.device | None = None) -> Trajectories:
        """The given trajectories, on ``device`` if one is named."""
        return Trajectories(
            self.states[rows].to(device),
            self.controls[rows].to(device),
            {name: tensor[rows].to(device) for name, tensor in self.scenes.items()},
        )


class TrajectoryDataset:
    """A complete dataset, opened read-only; tensors are read from the shards only when asked for.

    Attributes:
        path: The dataset folder.
        robot: The robot that was recorded.
        manifest: Everything ``manifest.json`` says.
    """

    def __init__(self, path: Path, robot: RobotSpec, manifest: dict[str, Any]) -> None:
        self.path = path
        self.robot = robot
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path, *, robot: RobotSpec | None = None) -> TrajectoryDataset:
        """Open and verify a dataset: format version, completeness, every shard's size and SHA-256.

        Args:
            path: Dataset folder.
            robot: If given, the dataset must have been recorded with exactly this robot.

        Raises:
            ValueError: Anything is missing, damaged, newer than this code, or of another robot.
        """
        path = Path(path)
        with readable(path / MANIFEST):
            return cls._open(path, robot)

    @classmethod
    def _open(cls, path: Path, robot: RobotSpec | None) -> TrajectoryDataset:
        manifest = read_json(path / MANIFEST, what="dataset manifest")
        if manifest.get("format") != FORMAT:
            raise ValueError(f"{path}: not a dataset (format {manifest.get('format')!r})")
        if manifest.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path}: dataset format_version {manifest.get('format_version')!r}, "
                f"this nerd-core reads {FORMAT_VERSION}"
            )
        if not manifest.get("complete"):
            raise ValueError(f"{path}: this dataset is incomplete; resume its recording first")
        absent = {"robot", "robot_digest", "engine", "extra", "shapes", "shards"} - manifest.keys()
        if absent:
            raise ValueError(f"{path}: dataset manifest lacks {', '.join(sorted(absent))}")
        recorded = RobotSpec.from_json(manifest["robot"])
        if recorded.digest() != manifest["robot_digest"]:
            raise ValueError(f"{path}: the robot in this dataset's manifest was edited")
        _check_shards(path, manifest["shards"], hashes=True)
        if not {"state", "control"} <= manifest["shapes"].keys() or not manifest["shards"]:
            raise ValueError(f"{path}: dataset manifest lists no states, controls or shards")
        if robot is not None and (gaps := recorded.differences(robot)):
            raise ValueError(f"{path}: recorded with another robot: {'; '.join(gaps)}")
        return cls(path, recorded, manifest)

    @property
    def digest(self) -> str:
        """Hex SHA-256 that names the recorded numbers and the robot, wherever the folder lies."""
        parts = [self.robot.digest(), *(shard["sha256"] for shard in self.manifest["shards"])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories N."""
        return sum(shard["rows"] for shard in self.manifest["shards"])

    @property
    def horizon(self) -> int:
        """Model steps T of every trajectory; it has T+1 states."""
        return self.manifest["shapes"]["control"]["shape"][0]

    @property
    def num_transitions(self) -> int:
        """Transitions, N times T."""
        return self.num_trajectories * self.horizon

    @property
    def scene_names(self) -> tuple[str, ...]:
        """Names of the static scene tensors, without their prefix."""
        names = self.manifest["shapes"]
        return tuple(n.removeprefix(SCENE_PREFIX) for n in names if n.startswith(SCENE_PREFIX))

    def split(self, val_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """Trajectories for training and held-out ones, as :func:`split` has it; groups of them stay together.

        Raises:
            ValueError: Nothing would be left to train on, or the manifest's groups do not fit its trajectories.
        """
        groups = self.manifest["extra"].get(ROW_GROUPS)
        if groups is None:
            return split(self.num_trajectories, val_fraction, seed)
        if len(groups) != self.num_trajectories:
            raise ValueError(f"{self.path}: {len(groups)} {ROW_GROUPS}, expected one of each trajectory")
        names, member = torch.tensor(groups).unique(return_inverse=True)
        sides = split(len(names), val_fraction, seed)
        return tuple(torch.isin(member, side).nonzero()[:, 0] for side in sides)  # type: ignore[return-value]

    def load_shard(self, index: int) -> Trajectories:
        """Map one shard; its pages are read from disk as they are touched."""
        entry = self.manifest["shards"][index]
        try:
            with safe_open(self.path / entry["file"], framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in self.manifest["shapes"]}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path / entry['file']}: damaged shard ({error})") from None
        for name, tensor in tensors.items():
            expected = [entry["rows"], *self.manifest["shapes"][name]["shape"]]
            if list(tensor.shape) != expected:
                raise ValueError(
                    f"{self.path / entry['file']}: {name} is {list(tensor.shape)}, the manifest says {expected}"
                )
        scenes = {name: tensors[f"{SCENE_PREFIX}{name}"] for name in self.scene_names}
        return Trajectories(tensors["state"], tensors["control"], scenes)

    def load(self) -> Trajectories:
        """Read the whole dataset into memory, shards in recorded order."""
        shards = [self.load_shard(index) for index in range(len(self.manifest["shards"]))]
        return Trajectories(
            torch.cat([shard.states for shard in shards]),
            torch.cat([shard.controls for shard in shards]),
            {n: torch.cat([shard.scenes[n] for shard in shards]) for n in self.scene_names},
        )


def split(count: int, val_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split trajectories, never windows, into training and held-out ones.

    Args:
        count: Number of trajectories.
        val_fraction: Held-out share in [0, 1); any share above zero holds out at least one.
        seed: Decides which.

    Returns:
        Sorted trajectory indices (training, held out), int64.

    Raises:
        ValueError: Nothing would be left to train on.
    """
    if not 0.0 <= val_fraction < 1.0:
        raise ValueError(f"val_fraction: got {val_fraction}, expected 0 <= val_fraction < 1")
    held_out = math.ceil(count * val_fraction)
    if count - held_out < 1:
        raise ValueError(f"val_fraction: {val_fraction} of {count} trajectories leaves none to train on")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held_out:].sort().values, order[:held_out].sort().values


def _add_counts(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in sorted({*first, *second})}


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators would not take."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}, expected at least 0 and below 2^63")


def _is_unused(path: Path) -> bool:
    """An empty folder, or one whose first manifest was being written when the recorder died."""
    return path.is_dir() and all(file.name == MANIFEST + TEMPORARY_SUFFIX for file in path.iterdir())


def _check_shards(path: Path, shards: list[dict[str, Any]], *, hashes: bool) -> None:
    for shard in shards:
        file = path / shard["file"]
        if not file.exists():
            raise ValueError(f"{file}: missing shard")
        size = file.stat().st_size
        if size != shard["bytes"]:
            raise ValueError(f"{file}: truncated or edited, {size} bytes instead of {shard['bytes']}")
        if hashes and sha256_of(file) != shard["sha256"]:
            raise ValueError(f"{file}: edited or damaged, its SHA-256 is not the manifest's")
