"""A run that was stopped and resumed is the run that never stopped, bit for bit."""

import dataclasses
import json

import pytest
import torch

from nerd_core.storage import read_tensors
from nerd_rl import Environment, GapCheck, train_policy
from nerd_rl.training import CHECKPOINT, METRICS, run_settings

N = 4


@pytest.fixture(scope="module")
def task(swing_up):
    ppo = dataclasses.replace(swing_up.ppo, steps=4, epochs=2, mini_batches=2, hidden=(8,))
    return dataclasses.replace(swing_up, episode_steps=6, ppo=ppo)


@pytest.fixture
def train(task, cartpole_physics, tmp_path, monkeypatch):
    # What the file looks like is for another test, and takes longest.
    monkeypatch.setattr("nerd_rl.training.export_policy", lambda *arguments: None)

    def run(physics, out, iterations, **options):
        settings = run_settings(task, worlds=N, seed=3, physics={"name": physics})
        environment = Environment(task, cartpole_physics(physics, N), seed=3)
        train_policy(environment, tmp_path / out, settings, iterations=iterations, progress=False, **options)
        return tmp_path / out

    return run


def everything(run):
    """All of a checkpoint but the time it took."""
    tensors = read_tensors(run / CHECKPOINT, what="checkpoint")
    del tensors["seconds"]
    return tensors


@pytest.mark.parametrize("physics", ["teacher", "mujoco", "nerd", "nerd-baseline"])
def test_two_and_two_iterations_are_four(physics, train):
    whole = everything(train(physics, "whole", 4))
    train(physics, "parts", 2)
    torch.manual_seed(12345)  # another process has other random numbers
    halves = everything(train(physics, "parts", 4, resume=True))
    assert set(whole) == set(halves)
    assert [name for name in whole if not torch.equal(whole[name], halves[name])] == []
    assert int(whole["iteration"]) == 4


def test_the_same_seed_trains_the_same_policy_and_another_one_does_not(train, task, cartpole_physics, tmp_path):
    first, second = everything(train("teacher", "first", 1)), everything(train("teacher", "second", 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    settings = run_settings(task, worlds=N, seed=4, physics={"name": "teacher"})
    environment = Environment(task, cartpole_physics("teacher", N), seed=3)
    train_policy(environment, tmp_path / "other", settings, iterations=1, progress=False)
    other = everything(tmp_path / "other")
    assert not torch.equal(first["actor.mlp.0.weight"], other["actor.mlp.0.weight"])


def test_a_look_from_outside_changes_nothing(train, task, cartpole_physics):
    plain = everything(train("teacher", "plain", 2))
    gap = GapCheck(environment=Environment(task, cartpole_physics("mujoco", 2)), every=1)
    seen = train("teacher", "seen", 2, gap=gap)
    found = everything(seen)
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    rows = [json.loads(line) for line in (seen / METRICS).read_text().splitlines()]
    assert [row["check_physics"] for row in rows] == ["mujoco", "mujoco"]
    assert all(isinstance(row["check_return_mean"], float) for row in rows)


def test_training_gives_the_callers_random_numbers_back(train):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train("teacher", "run", 1)
    assert torch.equal(torch.rand(3), expected)


def test_lines_after_the_checkpoint_come_again(train):
    run = train("teacher", "run", 2)
    with open(run / METRICS, "a") as file:
        file.write('{"iteration": 3, "seconds": 1}\n{"iterat')
    train("teacher", "run", 3, resume=True)
    assert [json.loads(line)["iteration"] for line in (run / METRICS).read_text().splitlines()] == [1, 2, 3]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(train):
    run = train("teacher", "run", 1)
    whole = everything(run)
    (run / CHECKPOINT).unlink()
    again = everything(train("teacher", "run", 1, resume=True))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
