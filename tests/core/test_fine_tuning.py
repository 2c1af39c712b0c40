import dataclasses
import json

import pytest
import torch

from nerd_core.artifact import build_model, load_model
from nerd_core.baseline import NerdBaselineConfig
from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.cli import main
from nerd_core.fine_tuning import freeze, refit_normalizers
from nerd_core.model import FlashNerdConfig
from nerd_core.run import TrainingRun
from nerd_core.storage import read_tensors
from nerd_core.train import TrainConfig, train

SIZES = FlashNerdConfig(width=8, heads=2, spans=(2, 3), hidden=8, readout_hidden=8)
BASELINE = NerdBaselineConfig(width=8, heads=2, layers=1, window=4, head_hidden=8)
CONFIG = TrainConfig(
    steps=6,
    batch_size=8,
    window=6,
    warmup=0,
    eval_every=2,
    checkpoint_every=2,
    eval_horizons=(1, 5),
    precision="float32",
    device="cpu",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect_cartpole(tmp_path_factory.mktemp("data") / "d", trajectories=40, horizon=12, progress=False)


@pytest.fixture(scope="module")
def earlier(data, tmp_path_factory):
    """A model of that CartPole."""
    out = tmp_path_factory.mktemp("run") / "earlier"
    return train(data, SIZES, dataclasses.replace(CONFIG, steps=20, lr=3e-3), out=out, progress=False)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The same robot with a lighter cart and a heavier pole: what it is fine-tuned to."""
    path = tmp_path_factory.mktemp("data") / "changed"
    cartpole = CartPole(cart_mass=20.0, pole_mass=8.0)
    return collect_cartpole(path, trajectories=40, horizon=12, seed=9, cartpole=cartpole, progress=False)


def tune(dataset, out, model, config=CONFIG, **options):
    train(dataset, SIZES, config, out=out, init_from=model, progress=False, **options)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def sample(dataset):
    states, controls, _ = dataset.load()
    return states[:, :-1].flatten(0, 1), controls.flatten(0, 1), states[:, 1:].flatten(0, 1)


def trained_weights(out):
    tensors = read_tensors(out / "last" / "checkpoint.safetensors", what="checkpoint")
    return {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}


@pytest.mark.parametrize("sizes", [SIZES, BASELINE])
def test_refitted_normalisers_are_those_of_the_new_data_and_leave_predictions_as_they_were(data, changed, sizes):
    torch.manual_seed(0)
    model = build_model(sizes, data.robot)
    model.fit(*sample(data))
    for parameter in model.parameters():  # zeros of the initialisation would hide a missing factor
        parameter.data += 0.2 * torch.randn_like(parameter)
    states, controls, _ = changed.load()
    states, controls = states[:8, :4], controls[:8, :4]
    before = model.increment(states, model(states, controls))
    fresh = build_model(sizes, data.robot)
    fresh.fit(*sample(changed))
    old = model.target_stats.std.clone()
    refit_normalizers(model, *sample(changed))
    for name in ("token_stats", "target_stats"):
        for statistic in ("mean", "std", "active"):
            torch.testing.assert_close(
                getattr(getattr(model, name), statistic), getattr(getattr(fresh, name), statistic), rtol=0, atol=0
            )
    assert ((model.target_stats.std / old - 1).abs() > 0.2).any()
    after = model.increment(states, model(states, controls))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5 * float(before.detach().abs().max()))


def test_a_channel_that_begins_to_move_starts_without_influence(data):
    model = build_model(SIZES, data.robot)
    state, control, after = sample(data)
    model.fit(state, 0 * control, after)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    assert model.token_stats.active[-1] == 0
    before = model.increment(state[:9, None], model(state[:9, None], control[:9, None]))
    refit_normalizers(model, state, control, after)
    assert model.token_stats.active[-1] == 1
    now = model.increment(state[:9, None], model(state[:9, None], control[:9, None]))
    torch.testing.assert_close(now, before, rtol=1e-4, atol=1e-5 * float(before.detach().abs().max()))


def test_the_error_before_the_first_update_is_recorded_and_best_is_never_worse(earlier, changed, tmp_path):
    lines = tune(changed, tmp_path / "run", earlier)
    assert [(line["step"], line["phase"]) for line in lines] == [(0, "before"), *((s, "teacher") for s in (2, 4, 6))]
    manifest = load_model(tmp_path / "run")[1]
    assert manifest["metrics"]["rollout_error_mean"] == min(line["rollout_error_mean"] for line in lines)
    # Too large a rate spoils the model; what is kept is the one that was there before.
    spoilt = tune(changed, tmp_path / "spoilt", earlier, dataclasses.replace(CONFIG, lr=0.5, ema=0.0))
    assert min(spoilt, key=lambda line: line["rollout_error_mean"])["step"] == 0
    kept, first = load_model(tmp_path / "spoilt" / "best")[0], load_model(earlier)[0]
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), first.parameters(), strict=True))


def test_frozen_parameters_keep_their_bits_and_the_others_move(earlier, changed, tmp_path):
    config = dataclasses.replace(CONFIG, freeze=("embed", "blocks.0"), normalizers="keep")
    tune(changed, tmp_path / "run", earlier, config)
    after, before = trained_weights(tmp_path / "run"), load_model(earlier)[0].state_dict()
    moved = {name for name, values in after.items() if not torch.equal(values, before[name])}
    frozen = {name for name in after if name.startswith(("embed.", "blocks.0."))}
    assert moved.isdisjoint(frozen)
    names = {name for name, _ in load_model(earlier)[0].named_parameters()}
    assert moved == names - frozen


def test_prefixes_that_name_nothing_or_everything_are_refused_with_the_choices(data):
    model = build_model(SIZES, data.robot)
    choices = "embed, blocks, blocks.0, blocks.1, norm, affine, readout_in, readout_out"
    with pytest.raises(ValueError, match=f"freeze: 'block' names no parameter, expected one of {choices}"):
        freeze(model, ("embed", "block"))
    with pytest.raises(ValueError, match="leaves no parameter"):
        freeze(model, ("embed", "blocks", "norm", "affine", "readout_in", "readout_out"))


@pytest.mark.parametrize("step", [1, 5, 9])
def test_a_killed_fine_tuning_ends_early_with_the_same_bits(earlier, changed, tmp_path, monkeypatch, step):
    config = dataclasses.replace(CONFIG, steps=200, lr=0.5, ema=0.0, patience=5, normalizers="refit", freeze=("embed",))
    lines = tune(changed, tmp_path / "whole", earlier, config)
    errors = [line["rollout_error_mean"] for line in lines]
    best = errors.index(min(errors))
    assert lines[-1]["step"] == 2 * (best + 5) < 200

    descend = TrainingRun.descend

    def dying(self, *arguments):
        if self.step == step:
            raise KeyboardInterrupt
        return descend(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "descend", dying)
        with pytest.raises(KeyboardInterrupt):
            tune(changed, tmp_path / "killed", earlier, config)
    tune(changed, tmp_path / "killed", earlier, config, resume=True)
    tune(changed, tmp_path / "killed", earlier, config, resume=True)  # of a run that had ended: nothing happens
    for file in ("last/checkpoint.safetensors", "best/weights.safetensors", "best/manifest.json", "metrics.jsonl"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_run_from_before_there_was_fine_tuning_is_resumed(data, tmp_path):
    out = tmp_path / "run"
    train(data, SIZES, CONFIG, out=out, progress=False)
    settings = json.loads((out / "config.json").read_text())
    for name in ("normalizers", "freeze", "patience"):
        del settings["train"][name]
    (out / "config.json").write_text(json.dumps(settings))
    train(data, SIZES, CONFIG, out=out, progress=False, resume=True)
    with pytest.raises(ValueError, match=r"train\.patience: None, not 3"):
        train(data, SIZES, dataclasses.replace(CONFIG, patience=3), out=out, progress=False, resume=True)


def test_the_command_says_what_was_before_and_after(earlier, changed, tmp_path, capsys):
    sizes = ["--width", "8", "--heads", "2", "--spans", "2", "3", "--hidden", "8", "--readout-hidden", "8"]
    flags = ["--steps", "2", "--window", "6", "--batch-size", "4", "--eval-every", "1", "--eval-horizons", "1", "5"]
    flags += ["--init-from", str(earlier), "--freeze", "embed", "--normalizers", "refit", "--device", "cpu"]
    main(["train", str(changed.path), "--out", str(tmp_path / "run"), *sizes, *flags])
    said = capsys.readouterr().err
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert f"before the first update: held-out rollout error {first['rollout_error_mean']:.2e}" in said
    assert f", before {first['rollout_error']}" in said


def test_normalisers_of_no_model_are_not_refitted(data, tmp_path):
    with pytest.raises(ValueError, match="normalizers: got 'refit' and no init_from"):
        train(data, SIZES, dataclasses.replace(CONFIG, normalizers="refit"), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    for field, value in (("normalizers", "forget"), ("patience", 0)):
        with pytest.raises(ValueError, match=field):
            dataclasses.replace(CONFIG, **{field: value})
