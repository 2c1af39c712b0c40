"""A trained policy: mean actions, its weights on disk, and its ONNX file."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nerd_core.storage import TEMPORARY_SUFFIX, read_tensors

from .ppo import PpoConfig
from .task import Task

__all__ = ["MeanPolicy", "export_policy", "load_policy", "mean_policy"]

MeanPolicy = Callable[[Tensor], Tensor]
"""Scaled observations, shape (N, O), to mean actions, shape (N, A), not yet clipped."""


def mean_policy(actor: Any) -> MeanPolicy:
    """The mean actions of an rsl_rl actor as it is now; later training does not change them."""
    frozen = actor.as_jit().eval().requires_grad_(False)

    def act(observation: Tensor) -> Tensor:
        with torch.no_grad():
            return frozen(observation)

    return act


def build_actor(task: Task, ppo: PpoConfig) -> Any:
    """An untrained rsl_rl actor for a task."""
    from rsl_rl.models import MLPModel
    from tensordict import TensorDict

    example = TensorDict({"policy": torch.zeros(1, task.num_observations)}, batch_size=[1])
    groups = {"actor": ["policy"]}
    with torch.random.fork_rng(devices=[]):  # its first weights are thrown away
        return MLPModel(
            example, groups, "actor", task.num_actions, **ppo.network(), distribution_cfg=ppo.distribution()
        )


def load_policy(path: Path, task: Task, ppo: PpoConfig) -> Any:
    """The actor whose weights are in a safetensors file.

    Raises:
        ValueError: No such file, a damaged one, or weights of other sizes.
    """
    actor = build_actor(task, ppo)
    try:
        actor.load_state_dict(read_tensors(path, what="policy"))
    except RuntimeError as error:
        raise ValueError(f"{path}: does not fit task {task.name}: {' '.join(str(error).split())}") from None
    return actor


def export_policy(path: Path, actor: Any, task: Task, extra: Mapping[str, Any] | None = None) -> None:
    """Write a policy as an ONNX file, in one step; an older one is replaced.

    Input ``obs`` (N, O): quantities in SI units, each times its scale; the normaliser is inside. Output ``actions``
    (N, A): means. The metadata, JSON each, say what the entries are: ``observation_names``, ``observation_scales``,
    ``action_names``, ``action_offset``, ``action_scale``, ``action_limit``, ``ctrl_range``, ``control``, ``dt`` [s],
    ``task``, ``robot``, ``robot_digest``, ``command_names``. The control to hold for ``dt`` is offset + scale ·
    clip(action, ± limit), within ``ctrl_range``.

    Args:
        path: The file.
        actor: An rsl_rl actor.
        task: The task it was trained on.
        extra: Further metadata, JSON values.
    """
    import onnx

    module = actor.as_onnx(verbose=False).to("cpu").eval()
    about = task.to_json()
    metadata = {
        "observation_names": [name for name, _ in about["observations"]],
        "observation_scales": [scale for _, scale in about["observations"]],
        "action_names": about["actions"],
        "command_names": about["commands"],
        "task": task.name,
        **{key: about[key] for key in ("action_offset", "action_scale", "action_limit", "ctrl_range", "control")},
        **{key: about[key] for key in ("dt", "robot", "robot_digest")},
        **(extra or {}),
    }
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    batch = torch.export.Dim("batch", min=1)
    with _quiet_exporter():
        torch.onnx.export(
            module,
            (torch.zeros(2, task.num_observations),),
            str(temporary),
            opset_version=18,
            input_names=["obs"],
            output_names=["actions"],
            dynamic_shapes=({0: batch},),
            external_data=False,
            verbose=False,
        )
    graph = onnx.load(str(temporary))
    onnx.helper.set_model_props(graph, {key: json.dumps(value) for key, value in metadata.items()})
    onnx.checker.check_model(graph)
    onnx.save(graph, str(temporary))
    os.replace(temporary, path)


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Keep the exporter's report off standard output, which is for results, and its hints off standard error."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.")
            yield
    finally:
        log.setLevel(level)
