"""What several test modules of nerd_mpc share: the robot, and a small model that knows no physics."""

import pytest
import torch
from torch import nn

from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerd, FlashNerdConfig
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain
from nerd_coupling.worlds import MujocoWorlds


@pytest.fixture(scope="session")
def go2():
    return load_robot("go2")


@pytest.fixture(scope="session")
def small_nerd(go2):
    """Random weights, but normalisers of real motion and a small readout: it moves, and does not run away."""
    sizes = FlashNerdConfig(width=32, heads=2, hidden=32, readout_hidden=32, spans=(2, 2))
    slots = ContactEncoderConfig(num_slots=2, slot_width=4, hidden=8, max_rows=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FlashNerd(sizes, go2.spec, ContactSetEncoder(slots, go2.spec, go2.probes))
        state = torch.tensor(go2.home_state).repeat(16, 1)
        control = torch.tensor(go2.home_ctrl) + 0.3 * torch.randn(16, 8, go2.spec.nu)
        with MujocoWorlds(go2, Terrain.platform(0.1), 1, threads=1) as worlds:
            states = worlds.rollout(state, control)
        model.fit(states[:, :-1].flatten(0, 1), control.flatten(0, 1), states[:, 1:].flatten(0, 1))
        nn.init.zeros_(model.affine.weight)
        nn.init.normal_(model.readout_out.weight, std=0.1)
    return model.eval().requires_grad_(False)
