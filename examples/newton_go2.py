"""Four Go2 on flat ground and a box in Newton, moved by a learned model.

    uv run python examples/newton_go2.py packages/nerd-mpc/src/nerd_mpc/models/go2-climb

Everything but the line that makes the solver is a plain Newton program.
"""

import sys

import newton
import torch
import warp as wp

from nerd_core import load_model
from nerd_coupling.newton_robot import add_robot
from nerd_coupling.robots import load_robot
from nerd_coupling.solver_nerd import SolverNerd


def main(path: str, seconds: float = 1.0) -> torch.Tensor:
    """Base heights [m], one per world, after some seconds of standing."""
    robot = load_robot("go2")
    network, _ = load_model(path, robot=robot.spec)

    one = newton.ModelBuilder()
    add_robot(one, robot, probes=network.context_encoder.probes)
    builder = newton.ModelBuilder()
    builder.replicate(one, 4, spacing=(0.0, 2.0, 0.0))
    builder.add_ground_plane()
    builder.add_shape_box(-1, xform=wp.transform((1.3, 0.0, 0.09), wp.quat_identity()), hx=0.3, hy=4.0, hz=0.09)
    model = builder.finalize()

    # solver = newton.solvers.SolverMuJoCo(model), and 0.005 s a step, is the analytical one.
    solver = SolverNerd(model, network.to(wp.device_to_torch(model.device)))

    state, after, control = model.state(), model.state(), model.control()
    pipeline = newton.CollisionPipeline(model)
    contacts = pipeline.contacts()
    newton.eval_fk(model, model.joint_q, model.joint_qd, state)  # pyright: ignore[reportArgumentType]

    for _ in range(round(seconds / solver.dt)):
        pipeline.collide(state, contacts)
        solver.step(state, after, control, contacts, solver.dt)
        state, after = after, state
    return solver.robot.read(state)[:, 2]


if __name__ == "__main__":
    print("base heights [m]:", [round(height, 3) for height in main(sys.argv[1]).tolist()])
