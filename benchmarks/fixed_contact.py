"""Train the fixed-contact baselines on the recipe's own data, with the settings of the recipe's first stage.

    uv run nerd-mpc recipe --out runs/recipe
    uv run python benchmarks/fixed_contact.py --recipe runs/recipe --contacts feet-ground --out runs/feet-ground

The result is compared with the recipe's model-0, which saw the same data for as many updates.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from nerd_core import TrajectoryDataset
from nerd_core.command import print_json, speaking_plainly
from nerd_core.train import train
from nerd_mpc.recipe import RecipeConfig, encoder_for, first_stage


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, from which data, to where."""

    recipe: Path
    """Folder of a finished recipe."""
    out: Path
    """Run folder to create."""
    contacts: str = "feet-ground"
    """feet-ground (NeRD's predefined points against the plane) or feet-any (the same points, decks seen too)."""

    def run(self) -> None:
        """Train and report."""
        config = RecipeConfig()
        parts = [p for name in ("random", "planner") for p in sorted((self.recipe / name).iterdir())]
        best = train(
            [TrajectoryDataset.open(part) for part in parts],
            config.model,
            first_stage(config),
            out=self.out,
            context_encoder=encoder_for(config, self.contacts),
        )
        print_json({"model": str(best)})


if __name__ == "__main__":
    speaking_plainly("benchmarks/fixed_contact.py", lambda: tyro.cli(Settings).run())
