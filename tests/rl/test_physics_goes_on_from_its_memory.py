"""What a physics remembers between two steps is all that the next one depends on."""

import pytest
import torch

from nerd_coupling.warp_worlds import MjWarpWorlds
from nerd_coupling.worlds import MujocoWorlds
from nerd_rl import EnginePhysics, Environment
from nerd_rl.physics import PHYSICS

N = 4


@pytest.mark.parametrize("physics", PHYSICS)
def test_a_physics_goes_on_from_its_memory_bit_for_bit(physics, swing_up, cartpole_physics):
    environment = Environment(swing_up, cartpole_physics(physics, N), seed=1)
    force = torch.full((N, 1), 0.4)
    for _ in range(5):
        environment.step(force)
    kept = {name: value.clone() for name, value in environment.memory().items()}
    expected = [environment.step(-force) for _ in range(4)]
    other = Environment(swing_up, cartpole_physics(physics, N), seed=99)
    other.restore(kept)
    for step in expected:
        again = other.step(-force)
        assert torch.equal(step.observation, again.observation)
        assert torch.equal(step.state, again.state)


@pytest.mark.parametrize("engine", ["mujoco", "mjwarp"])
def test_warm_starts_of_a_robot_on_the_ground_are_remembered(engine, go2_task):
    def standing():
        if engine == "mujoco":
            return EnginePhysics(MujocoWorlds(go2_task.robot, go2_task.terrain, 1, threads=1))
        return EnginePhysics(MjWarpWorlds(go2_task.robot, go2_task.terrain, 1))

    physics, other = standing(), standing()
    control = torch.tensor(go2_task.robot.home_ctrl)[None] + 0.1
    for _ in range(5):
        state = physics.step(control)
    kept = {name: value.clone() for name, value in physics.memory().items()}
    expected = physics.step(control)
    other.restore(kept)
    assert torch.equal(other.step(control), expected)
    # Without the warm start the solver, which stops after ten iterations, ends elsewhere.
    other.reset(state, torch.tensor([True]))
    assert not torch.equal(other.step(control), expected)
