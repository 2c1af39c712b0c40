import dataclasses
import json

import pytest

from nerd_core.artifact import load_model
from nerd_core.baseline import NerdBaseline, NerdBaselineConfig
from nerd_core.cartpole import collect_cartpole
from nerd_core.cli import Train, main
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.presets import FULL, SMALL, TINY, preset
from nerd_core.train import TrainConfig, train

SIZES = NerdBaselineConfig(width=8, heads=2, layers=2, window=5, head_hidden=8)
CONFIG = TrainConfig(
    steps=6,
    recursive_steps=4,
    batch_size=4,
    window=5,
    warmup=2,
    eval_every=3,
    checkpoint_every=2,
    eval_horizons=(1, 5),
    recursive_horizon=3,
    recursive_batch=4,
    precision="float32",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect_cartpole(tmp_path_factory.mktemp("d") / "d", trajectories=40, horizon=12, progress=False)


@pytest.fixture(scope="module")
def baseline(data, tmp_path_factory):
    return train(data, SIZES, CONFIG, out=tmp_path_factory.mktemp("r") / "run", progress=False)


def test_the_baseline_passes_through_both_phases_and_learns(baseline):
    model, manifest = load_model(baseline)
    assert isinstance(model, NerdBaseline)
    assert manifest["architecture"] == "nerd-baseline"
    rows = [json.loads(line) for line in (baseline.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6, 9, 10]
    assert [row["phase"] for row in rows] == ["teacher"] * 2 + ["recursive"] * 2
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]


def test_a_baseline_run_is_resumed_only_as_what_it_is(data, baseline):
    flash = FlashNerdConfig(width=8, heads=2, spans=(2,))
    with pytest.raises(ValueError, match="architecture: 'nerd-baseline', not 'flash-nerd'"):
        train(data, flash, CONFIG, out=baseline.parent, resume=True, progress=False)
    assert train(data, SIZES, CONFIG, out=baseline.parent, resume=True, progress=False) == baseline


def test_one_architecture_does_not_start_from_the_other(data, baseline, tmp_path):
    flash = FlashNerdConfig(width=8, heads=2, spans=(2,))
    with pytest.raises(ValueError, match="another model: architecture: 'nerd-baseline', not 'flash-nerd'"):
        train(data, flash, CONFIG, out=tmp_path / "run", init_from=baseline, progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sizes", "window", "words"),
    [
        (FlashNerdConfig(spans=(3, 3)), 4, "window: got 4, expected at least the model's receptive field of 5"),
        (SIZES, 4, "window: got 4, expected at least the model's receptive field of 5"),
        (SIZES, 6, "window: got 6, expected 5"),
        (NerdBaselineConfig(), 11, "window: got 11, expected 10"),
    ],
)
def test_windows_that_do_not_suit_the_network_are_refused(data, tmp_path, sizes, window, words):
    with pytest.raises(ValueError, match=words):
        train(data, sizes, dataclasses.replace(CONFIG, window=window), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_command_trains_either_network_with_sizes_of_its_own(data, tmp_path):
    tiny = ("--preset", "tiny", "--steps", "2", "--threads", "1")
    main(["train", str(data.path), "--out", str(tmp_path / "a"), *tiny, "--window=12", "--width", "16"])
    sizes = ("--baseline.layers", "1", "--baseline.width", "12", "--baseline.window", "8", "--window", "8")
    main(["train", str(data.path), "--out", str(tmp_path / "b"), "--architecture", "nerd-baseline", *tiny, *sizes])
    ours, manifest = load_model(tmp_path / "a" / "best")
    assert isinstance(ours, FlashNerd)
    assert ours.config == dataclasses.replace(TINY.model, width=16)
    made = manifest["training"]
    assert (made["steps"], made["window"], made["lr"]) == (2, 12, TINY.train.lr)
    theirs, manifest = load_model(tmp_path / "b" / "best")
    assert theirs.config == dataclasses.replace(TINY.baseline, layers=1, width=12, window=8)
    assert (manifest["training"]["window"], manifest["training"]["batch_size"]) == (8, TINY.baseline_batch)


def test_sizes_of_the_network_that_was_not_chosen_are_refused(data, tmp_path, capsys):
    for flags in (("--baseline.layers", "3"), ("--architecture", "nerd-baseline", "--width", "64")):
        with pytest.raises(SystemExit) as leaving:
            main(["train", str(data.path), "--out", str(tmp_path / "r"), *flags])
        assert leaving.value.code == 2
        message = capsys.readouterr().err
        assert "architecture: " in message
        assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_defaults_follow_the_last_preset_and_architecture_of_the_command_line():
    chosen = Train.following(["train", "d", "--preset=small", "--architecture", "nerd-baseline", "--preset", "full"])
    assert (chosen.model, chosen.baseline, chosen.config) == (
        FULL.model,
        FULL.baseline,
        FULL.settings("nerd-baseline"),
    )
    plain = Train.following(["train", "d", "--preset", "huge"])
    assert (plain.model, plain.config) == (FlashNerdConfig(), TrainConfig())


@pytest.mark.parametrize("name", ["tiny", "small", "full", None])
def test_every_preset_suits_both_networks(name):
    chosen = preset(name)
    assert chosen.train.window >= chosen.model.receptive_field
    theirs = chosen.settings("nerd-baseline")
    assert theirs.window == chosen.baseline.receptive_field
    # No strawman: the baseline reads at least as many frames per update, over as many updates.
    assert theirs.batch_size * theirs.window >= chosen.train.batch_size * chosen.train.window
    assert theirs.steps == chosen.train.steps


def test_presets_grow_and_the_small_one_is_the_default():
    sizes = [chosen.train.steps for chosen in (TINY, SMALL, FULL)]
    assert sizes == sorted(set(sizes))
    assert dataclasses.replace(SMALL.train, eval_horizons=TrainConfig().eval_horizons) == TrainConfig()
    assert (SMALL.model, SMALL.baseline) == (FlashNerdConfig(), NerdBaselineConfig())
