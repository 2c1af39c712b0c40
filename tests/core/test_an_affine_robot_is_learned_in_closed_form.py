import json

import pytest
import torch

from nerd_core.dataset import Trajectories, TrajectoryDataset, TrajectoryWriter
from nerd_core.evaluate import affine_baseline, evaluate
from nerd_core.losses import teacher_loss
from nerd_core.model import FlashNerdConfig
from nerd_core.robot import Body, Joint, RobotSpec
from nerd_core.train import TrainConfig, train
from nerd_core.windows import TrajectoryPool, WindowSampler, seeded_generator

DT = 1 / 60


def slider():
    """A unit mass on a rail: the double integrator, one semi-implicit step per model step."""
    return RobotSpec(
        name="slider",
        floating=False,
        bodies=(Body(name="mass", parent=-1),),
        joints=(Joint(name="rail", kind="slide", body=0, axis=(1.0, 0.0, 0.0)),),
        control="effort",
        actuated=(0,),
        ctrl_range=((-1.0, 1.0),),
        effort_limit=(1.0,),
        timestep=DT,
        substeps=1,
    )


def trajectories(rows=64, steps=200, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    state = 2 * torch.rand(rows, 2, dtype=torch.float64, generator=draw) - 1
    force = 2 * torch.rand(rows, steps, 1, dtype=torch.float64, generator=draw) - 1
    states = [state]
    for t in range(steps):
        speed = states[-1][:, 1] + DT * force[:, t, 0]
        states.append(torch.stack([states[-1][:, 0] + DT * speed, speed], -1))
    return Trajectories(torch.stack(states, 1).to(dtype), force.to(dtype), {})


def one_step(model, states, controls):
    with torch.no_grad():
        return float(teacher_loss(model, states, controls, None))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_double_integrator_is_exact_after_the_closed_form_fit(dtype):
    # Reference facts, section 9 item 8.
    data = trajectories(dtype=dtype)
    found = evaluate(affine_baseline(slider(), data), data, horizons=(1, 200))
    first, last = found.horizons
    assert first.at_step < 1e-6
    assert last.at_step < 1e-4
    assert first.zero_increment > 1e-3


@pytest.mark.parametrize("shift", [-1, 1])
def test_controls_that_are_off_by_one_do_not_go_unnoticed(shift):
    data = trajectories()
    wrong = data._replace(controls=data.controls.roll(shift, 1))
    model = affine_baseline(slider(), data)
    right = one_step(model, data.states, data.controls)
    assert right < 1e-9
    assert one_step(model, wrong.states, wrong.controls) > 0.5
    # Nor can a fit to the wrong pairing hide it: the force explains nothing then.
    refitted = affine_baseline(slider(), wrong)
    assert one_step(refitted, wrong.states, wrong.controls) > 0.4


def test_sampled_windows_keep_states_controls_and_successors_together():
    data = trajectories(rows=7, steps=20)
    model = affine_baseline(slider(), data)
    shorter = Trajectories(data.states[:3, 5:16], data.controls[:3, 5:15], {})
    pool = TrajectoryPool([data, shorter], torch.device("cpu"))
    sampler = WindowSampler(pool, torch.arange(10), 6)
    rows, offsets = sampler.draw(500, seeded_generator(0))
    states, controls = pool.windows(rows, offsets, 6)
    assert one_step(model, states, controls) < 1e-9


def test_training_passes_the_closed_form_through_disk_windows_and_rollout(tmp_path):
    data = trajectories(rows=20, steps=40, dtype=torch.float32)
    with TrajectoryWriter(tmp_path / "d", slider(), engine={}, seed=0) as writer:
        writer.append(data.states[:12], data.controls[:12])
        writer.append(data.states[12:], data.controls[12:])
    best = train(
        TrajectoryDataset.open(tmp_path / "d"),
        FlashNerdConfig(width=8, heads=1, spans=(2, 2), hidden=8, readout_hidden=8),
        TrainConfig(steps=1, lr=1e-9, window=8, batch_size=4, precision="float32", warmup=0),
        out=tmp_path / "run",
        progress=False,
    )
    assert best == tmp_path / "run" / "best"
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 1
    found = json.loads(metrics[0])
    assert found["rollout_error"]["1"] < 1e-6
    assert found["rollout_error"]["20"] < 1e-5
