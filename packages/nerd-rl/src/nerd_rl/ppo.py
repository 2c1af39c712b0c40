"""Settings of PPO, in the field's words, and what rsl_rl calls them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["PpoConfig"]


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """Settings of proximal policy optimisation (Schulman et al. 2017), which rsl_rl runs.

    Attributes:
        steps: Model steps of every world between two updates.
        epochs: Passes over what was collected.
        mini_batches: Gradient steps per pass.
        discount: γ.
        trace: λ of the generalised advantage estimate.
        clip: Bound on the change of an action's probability ratio.
        learning_rate: Adam's first rate; it follows the policy's change from then on.
        desired_kl: Change of the policy per update, as a Kullback-Leibler divergence, that the rate aims at.
        value_coefficient: Weight of the value loss.
        entropy_coefficient: Weight of the entropy bonus.
        gradient_norm: Largest norm of the gradient.
        hidden: Widths of the hidden layers of policy and value function.
        activation: Their activation, rsl_rl's name.
        initial_std: Standard deviation of the first actions.
    """

    steps: int = 24
    epochs: int = 5
    mini_batches: int = 4
    discount: float = 0.99
    trace: float = 0.95
    clip: float = 0.2
    learning_rate: float = 1e-3
    desired_kl: float = 0.01
    value_coefficient: float = 1.0
    entropy_coefficient: float = 0.0
    gradient_norm: float = 1.0
    hidden: tuple[int, ...] = (128, 128, 128)
    activation: str = "elu"
    initial_std: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        for name in ("steps", "epochs", "mini_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("clip", "learning_rate", "desired_kl", "gradient_norm", "initial_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive number")
        for name in ("discount", "trace"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected above 0 and at most 1")
        for name in ("value_coefficient", "entropy_coefficient"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 0")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden is {self.hidden}, expected at least one layer, each at least 1 wide")

    def network(self) -> dict[str, Any]:
        """Settings that policy and value function share, as rsl_rl's MLPModel takes them."""
        return {"hidden_dims": list(self.hidden), "activation": self.activation, "obs_normalization": True}

    def distribution(self) -> dict[str, Any]:
        """Settings of the policy's distribution, as rsl_rl takes them."""
        return {"class_name": "GaussianDistribution", "init_std": self.initial_std, "std_type": "log"}

    def rsl_settings(self) -> dict[str, Any]:
        """The settings of an rsl_rl ``OnPolicyRunner``."""
        network = {"class_name": "MLPModel", **self.network()}
        return {
            "num_steps_per_env": self.steps,
            "save_interval": 1,
            "check_for_nan": True,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": {**network, "distribution_cfg": self.distribution()},
            "critic": dict(network),
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": self.epochs,
                "num_mini_batches": self.mini_batches,
                "clip_param": self.clip,
                "gamma": self.discount,
                "lam": self.trace,
                "value_loss_coef": self.value_coefficient,
                "entropy_coef": self.entropy_coefficient,
                "learning_rate": self.learning_rate,
                "max_grad_norm": self.gradient_norm,
                "schedule": "adaptive",
                "desired_kl": self.desired_kl,
            },
        }
