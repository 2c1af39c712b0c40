import dataclasses
import json

import pytest
import torch

from nerd_core.artifact import load_model
from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.model import FlashNerdConfig
from nerd_core.run import TrainingRun
from nerd_core.storage import read_tensors
from nerd_core.train import TrainConfig, train

SIZES = FlashNerdConfig(width=8, heads=2, spans=(2, 3), hidden=8, readout_hidden=8)
CONFIG = TrainConfig(
    steps=6,
    recursive_steps=4,
    batch_size=4,
    window=6,
    warmup=2,
    eval_every=2,
    checkpoint_every=2,
    eval_horizons=(1, 5),
    recursive_horizon=3,
    recursive_batch=4,
    precision="float32",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "cartpole"
    return collect_cartpole(path, trajectories=40, horizon=12, progress=False)


@pytest.fixture(scope="module")
def uninterrupted(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "whole"
    train(dataset, SIZES, CONFIG, out=out, progress=False)
    return out


def run(dataset, out, config=CONFIG, **options):
    return train(dataset, SIZES, config, out=out, progress=False, **options)


def kill_at(monkeypatch, step, method="descend"):
    original = getattr(TrainingRun, method)

    def dying(self, *arguments):
        if self.step == step:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(TrainingRun, method, dying)


@pytest.mark.parametrize(
    ("step", "method"),
    [(1, "descend"), (4, "descend"), (5, "descend"), (7, "descend"), (8, "save"), (10, "record")],
)
def test_a_killed_run_ends_with_the_same_bits(dataset, uninterrupted, tmp_path, monkeypatch, step, method):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, step, method)
        with pytest.raises(KeyboardInterrupt):
            run(dataset, out)
    torch.manual_seed(step)  # the caller's random state must not matter
    run(dataset, out, resume=True)
    for file in ("last/checkpoint.safetensors", "best/weights.safetensors", "best/manifest.json"):
        assert (out / file).read_bytes() == (uninterrupted / file).read_bytes(), file
    assert (out / "metrics.jsonl").read_text() == (uninterrupted / "metrics.jsonl").read_text()


def test_a_metrics_line_cut_short_by_the_kill_is_dropped(dataset, uninterrupted, tmp_path):
    run(dataset, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 1')
    run(dataset, tmp_path / "run", resume=True)
    assert metrics.read_text() == (uninterrupted / "metrics.jsonl").read_text()


def test_two_runs_from_one_seed_are_equal_and_another_seed_differs(dataset, uninterrupted, tmp_path):
    run(dataset, tmp_path / "same")
    run(dataset, tmp_path / "other", dataclasses.replace(CONFIG, seed=1))
    weights = [
        (path / "best" / "weights.safetensors").read_bytes()
        for path in (uninterrupted, tmp_path / "same", tmp_path / "other")
    ]
    assert weights[0] == weights[1] != weights[2]


def test_training_leaves_the_callers_random_state_and_threads_alone(dataset, tmp_path):
    torch.manual_seed(7)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    run(dataset, tmp_path / "run", dataclasses.replace(CONFIG, threads=2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_the_best_model_is_the_one_with_the_least_held_out_rollout_error(uninterrupted):
    lines = [json.loads(s) for s in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
    assert [line["phase"] for line in lines] == ["teacher"] * 3 + ["recursive"] * 2
    _, manifest = load_model(uninterrupted / "best")
    least = min(lines, key=lambda line: line["rollout_error_mean"])
    assert manifest["training"]["step"] == least["step"]
    assert manifest["metrics"]["rollout_error_mean"] == least["rollout_error_mean"]


def test_a_folder_that_holds_a_run_is_refused(dataset, uninterrupted):
    with pytest.raises(ValueError, match="exists"):
        run(dataset, uninterrupted)


def test_resuming_with_other_settings_or_data_lists_the_differences(dataset, uninterrupted, tmp_path):
    with pytest.raises(ValueError, match=r"train.lr: 0.001, not 0.5; train.seed: 0, not 3"):
        run(dataset, uninterrupted, dataclasses.replace(CONFIG, lr=0.5, seed=3), resume=True)
    other = collect_cartpole(tmp_path / "d", trajectories=9, horizon=12, progress=False)
    with pytest.raises(ValueError, match="datasets"):
        run(other, uninterrupted, resume=True)
    with pytest.raises(ValueError, match="no such run"):
        run(dataset, tmp_path / "nothing", resume=True)


def test_datasets_of_two_robots_are_not_mixed(dataset, tmp_path):
    other = collect_cartpole(tmp_path / "d", trajectories=9, horizon=12, cartpole=CartPole(substeps=4), progress=False)
    with pytest.raises(ValueError, match="another robot: substeps"):
        run([dataset, other], tmp_path / "run")


def test_a_run_that_diverges_says_so_and_leaves_no_broken_model(dataset, tmp_path):
    config = dataclasses.replace(CONFIG, steps=60, lr=1e30, warmup=0, grad_clip=1e30)
    with pytest.raises(ValueError, match="expected a smaller lr"):
        run(dataset, tmp_path / "long", config)
    with pytest.raises(ValueError, match="diverged"):
        run(dataset, tmp_path / "short", dataclasses.replace(config, steps=4, recursive_steps=0))
    assert not (tmp_path / "long" / "best").exists()
    assert not (tmp_path / "short" / "best").exists()


def test_starting_from_a_model_keeps_its_normalisers(dataset, uninterrupted, tmp_path):
    other = collect_cartpole(tmp_path / "d", trajectories=40, horizon=12, seed=5, progress=False)
    config = dataclasses.replace(CONFIG, steps=1, recursive_steps=0)
    run(other, tmp_path / "run", config, init_from=uninterrupted / "best")
    first = load_model(uninterrupted / "best")[0]
    second = read_tensors(tmp_path / "run" / "last" / "checkpoint.safetensors", what="checkpoint")
    assert torch.equal(first.token_stats.mean, second["model.token_stats.mean"])
    change = (first.embed.weight - second["model.embed.weight"]).abs().max()
    assert 0 < change < 0.1
    wide = dataclasses.replace(SIZES, width=16)
    with pytest.raises(ValueError, match=r"config.width: 8, not 16"):
        train(
            other,
            wide,
            config,
            out=tmp_path / "wide",
            init_from=uninterrupted / "best",
            progress=False,
        )


def test_several_datasets_train_one_model_and_are_named_in_it(dataset, tmp_path):
    longer = collect_cartpole(tmp_path / "d", trajectories=30, horizon=20, seed=2, progress=False)
    best = run([dataset, longer], tmp_path / "run")
    assert load_model(best)[1]["datasets"] == [dataset.digest, longer.digest]


def test_a_window_longer_than_the_trajectories_is_refused_before_the_folder_exists(dataset, tmp_path):
    with pytest.raises(ValueError, match="window: got 64"):
        run(dataset, tmp_path / "run", dataclasses.replace(CONFIG, window=64))
    assert not (tmp_path / "run").exists()


def test_training_reduces_the_held_out_error_below_the_affine_start(dataset, tmp_path):
    config = dataclasses.replace(CONFIG, steps=150, recursive_steps=30, batch_size=32, lr=3e-3, eval_every=1, ema=0.9)
    config = dataclasses.replace(config, eval_every=30, checkpoint_every=1000)
    run(dataset, tmp_path / "run", config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert last["rollout_error_mean"] < 0.7 * first["rollout_error_mean"]
    checkpoint = read_tensors(tmp_path / "run" / "last" / "checkpoint.safetensors", what="c")
    assert int(checkpoint["step"]) == 180


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("lr", float("nan")),
        ("lr", -1.0),
        ("ema", 1.0),
        ("val_fraction", 0.0),
        ("precision", "float16"),
        ("threads", 0),
        ("eval_horizons", ()),
        ("weight_decay", -1.0),
    ],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})


def test_an_unknown_device_is_named(dataset, tmp_path):
    with pytest.raises(ValueError, match="device: got 'toaster'"):
        run(dataset, tmp_path / "run", dataclasses.replace(CONFIG, device="toaster"))
