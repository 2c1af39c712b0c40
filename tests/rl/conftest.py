"""What several test modules of nerd_rl share: tasks, small models that know no physics, worlds of every kind."""

import pytest
import torch
from torch import nn

from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig
from nerd_core.cartpole import CartPole
from nerd_coupling.robots import load_robot
from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import MujocoWorlds
from nerd_rl import EnginePhysics, LearnedPhysics, TeacherPhysics, cartpole_swing_up
from nerd_rl.velocity import go2_velocity


def small_model(kind="nerd", robot=None, seed=0):
    """Random weights behind the normalisers of real CartPole motion: it moves, and does not run away."""
    robot = robot or CartPole().robot()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "nerd":
            sizes = FlashNerdConfig(width=16, heads=2, hidden=16, readout_hidden=16, spans=(2, 3))
            model = FlashNerd(sizes, robot)
        else:
            model = NerdBaseline(NerdBaselineConfig(width=16, heads=2, layers=1, window=4, block=4), robot)
        states, forces = CartPole().record(32, 8, torch.Generator().manual_seed(seed))
        states, forces = states.float(), forces.float()
        model.fit(states[:, :-1].flatten(0, 1), forces.flatten(0, 1), states[:, 1:].flatten(0, 1))
        if kind == "nerd":
            nn.init.normal_(model.readout_out.weight, std=0.3)
    return model.eval()


def small_go2_model(seed=0):
    """A Go2 that sees contact rows; its history and the ground both matter."""
    go2 = load_robot("go2")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = FlashNerdConfig(width=16, heads=2, hidden=16, readout_hidden=16, spans=(2, 2))
        slots = ContactEncoderConfig(num_slots=2, slot_width=4, hidden=8, max_rows=8)
        model = FlashNerd(sizes, go2.spec, ContactSetEncoder(slots, go2.spec, go2.probes))
        nn.init.normal_(model.readout_out.weight, std=0.1)
        model.target_stats.std.fill_(0.01)
    return model.eval()


def cartpole_physics(name, nworld, compiled=False):
    """A physics of CartPole worlds; learned ones are untrained."""
    robot, terrain = load_robot("cartpole"), cartpole_swing_up().terrain
    if name == "teacher":
        return TeacherPhysics(nworld)
    if name == "mujoco":
        return EnginePhysics(MujocoWorlds(robot, terrain, nworld, threads=1))
    if name == "mjwarp":
        return EnginePhysics(MjWarpWorlds(robot, terrain, nworld))
    return LearnedPhysics(small_model(name), terrain, nworld, compiled=compiled, name=name)


@pytest.fixture(scope="session", name="cartpole_physics")
def _cartpole_physics():
    return cartpole_physics


@pytest.fixture(scope="session")
def go2_model():
    return small_go2_model()


@pytest.fixture(scope="session")
def played():
    return Played


@pytest.fixture(scope="session")
def swing_up():
    return cartpole_swing_up()


@pytest.fixture(scope="session")
def go2_task():
    return go2_velocity()


class Played:
    """A physics that plays states back, whatever it is told: what the environment makes of them is all there is."""

    name = "played"

    def __init__(self, robot, states):  # states (T, N, nq + nv)
        self.robot, self._states = robot, states
        self.nworld, self.device, self._next = states.shape[1], torch.device("cpu"), 0
        self.resets = []

    def reset(self, state, mask):
        self.resets.append(mask.clone())

    def step(self, control):
        self._next += 1
        return self._states[self._next - 1]

    def outside(self):
        return None

    def memory(self):
        return {}

    def restore(self, memory):
        pass

    def close(self):
        pass


@pytest.fixture(scope="session")
def small_cartpole_model():
    return small_model()
