"""A training run's weights, averages and optimizer, and the files that hold them."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .artifact import BEST, Model, save_model
from .distributed import Group
from .storage import read_tensors, readable, recover_directory, write_tensors

__all__ = ["TrainingRun"]

METRICS = "metrics.jsonl"
CHECKPOINT = "last/checkpoint.safetensors"
CHECKPOINT_VERSION = 2
"""Version 1 had no ``format_version`` and did not keep the losses since the last evaluation."""
MAX_SKIPPED = 20


class TrainingRun:
    """Everything that changes while a model is trained.

    Args:
        out: Run folder.
        model: The network being trained; parameters that need no gradient stay as they are.
        ema: Decay of the averaged weights.
        weight_decay: AdamW's, on weight matrices only.
        grad_clip: Largest norm of the gradient.
        group: The processes that train together; only their leader writes.

    Attributes:
        average: The network with averaged weights, which is evaluated and saved.
        optimizer: AdamW, one fused kernel per step.
        step: Updates done.
        best: Least held-out rollout error so far.
        stale: Evaluations since then.
        note: Words for the progress bar.
    """

    def __init__(
        self,
        out: Path,
        model: Model,
        *,
        ema: float,
        weight_decay: float,
        grad_clip: float,
        group: Group,
    ) -> None:
        self.out, self.model, self._ema, self._grad_clip, self._group = out, model, ema, grad_clip, group
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._averaged: list[Tensor] = [self.average.get_parameter(name) for name in trained]
        self._trained: list[Tensor] = [model.get_parameter(name) for name in trained]
        self.step, self.best, self.stale, self.note = 0, math.inf, 0, ""
        self._losses: list[Tensor] = []
        self._skipped = 0
        groups = [
            {
                "params": [p for p in self._trained if p.ndim >= 2],
                "weight_decay": weight_decay,
            },
            {"params": [p for p in self._trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, fused=True)

    def descend(self, loss: Tensor, lr: float) -> None:
        """One update: gradients averaged over the processes, clipping, optimizer, averaged weights.

        An update whose gradient is not finite is skipped.

        Raises:
            ValueError: Too many updates in a row were skipped.
        """
        loss.backward()
        loss = self._group.average_gradients(self._trained, loss)
        norm = nn.utils.clip_grad_norm_(self._trained, self._grad_clip)
        if bool(norm.isfinite()):
            self._skipped = 0
            if self._group.leads:
                self._losses.append(loss)
            self._apply(lr)
        else:
            self._skipped += 1
            if self._skipped > MAX_SKIPPED:
                raise ValueError(
                    f"lr: training diverged at step {self.step} with lr {lr:g}, {self._skipped} "
                    "updates in a row had gradients that are not finite; expected a smaller lr"
                )
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _apply(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        # Early on the average follows faster, or it would remember the initialisation for long.
        decay = min(self._ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self._averaged, self._trained, 1 - decay)

    def pop_mean_loss(self) -> float:
        """Mean training loss since the last call; NaN if every update was skipped."""
        mean = float(torch.stack(self._losses).mean()) if self._losses else math.nan
        self._losses = []
        return mean

    def record(self, found: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Log an evaluation, and keep the averaged model if it is the best so far.

        Args:
            found: JSON values, ``rollout_error_mean`` among them; None if it is not finite.
            meta: What :func:`nerd_core.artifact.save_model` takes.
        """
        with open(self.out / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        error = math.inf if found["rollout_error_mean"] is None else found["rollout_error_mean"]
        self.note = f"held-out rollout error {error:.2e}"
        self.stale += 1
        if error < self.best:
            self.best, self.stale = error, 0
            save_model(self.out / BEST, self.average, meta, overwrite=True)

    def is_stale(self, patience: int | None) -> bool:
        """Whether the last ``patience`` evaluations brought no better error; never if None."""
        return patience is not None and self.stale >= patience

    def share_staleness(self) -> None:
        """Tell the other processes, which do not evaluate, what the leader's evaluation found."""
        stale = torch.tensor(self.stale, device=self._trained[0].device)
        self._group.copy_from_leader([stale])
        self.stale = int(stale)

    def save(self) -> None:
        """Write the checkpoint: one file, replaced in one step."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
        tensors["format_version"] = torch.tensor(CHECKPOINT_VERSION)
        tensors["step"] = torch.tensor(self.step)
        tensors["best"] = torch.tensor(self.best, dtype=torch.float64)
        tensors["stale"] = torch.tensor(self.stale)
        tensors["skipped"] = torch.tensor(self._skipped)
        tensors["losses"] = torch.stack(self._losses) if self._losses else torch.empty(0)
        (self.out / CHECKPOINT).parent.mkdir(exist_ok=True)
        write_tensors(self.out / CHECKPOINT, tensors)

    def finish(self) -> Path:
        """Folder of the best model.

        Raises:
            ValueError: No evaluation gave a finite rollout error, so there is none.
        """
        if self._group.leads and self.best == math.inf:
            raise ValueError(f"{self.out}: training diverged, no rollout error was ever finite")
        return self.out / BEST

    def restore(self) -> None:
        """Go back to the last checkpoint; metrics written after it are dropped, they come again.

        Without a checkpoint, the run was killed before its first one and starts over.

        Raises:
            ValueError: The checkpoint is damaged, of another model, or of a newer format.
        """
        path = self.out / CHECKPOINT
        if path.exists():
            with readable(path):
                self._load(path, read_tensors(path, what="checkpoint"))
        if self._group.leads:
            recover_directory(self.out / BEST)
            self._drop_later_metrics()

    def _load(self, path: Path, tensors: dict[str, Tensor]) -> None:
        version = int(tensors.get("format_version", 1))
        if version > CHECKPOINT_VERSION:
            raise ValueError(
                f"{path}: checkpoint format_version {version}, this nerd-core reads up to {CHECKPOINT_VERSION}"
            )
        self.step, self.best = int(tensors["step"]), float(tensors["best"])
        self.stale = int(tensors.get("stale", 0))  # absent in runs from before there was a patience
        self._skipped = int(tensors.get("skipped", 0))
        self._losses = list(tensors.get("losses", torch.empty(0)).to(self._trained[0].device).unbind())
        try:
            self.model.load_state_dict(_under(tensors, "model."))
            self.average.load_state_dict(_under(tensors, "average."))
        except RuntimeError as error:
            raise ValueError(f"{path}: does not fit the run's settings: {' '.join(str(error).split())}") from None
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _under(tensors, "optimizer.").items():
            index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _drop_later_metrics(self) -> None:
        path, kept = self.out / METRICS, []
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line cut short by the kill
                if self.step and json.loads(line)["step"] <= self.step:
                    kept.append(line)
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
