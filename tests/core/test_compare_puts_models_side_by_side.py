import json
import math

import pytest
import torch

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig, save_model
from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.cli import main
from nerd_core.comparison import compare, held_out_rows
from nerd_core.dataset import Trajectories, split
from nerd_core.evaluate import affine_baseline, channel_sigma, evaluate, squared_error
from nerd_core.windows import seeded_generator

CART = CartPole()
ROBOT = CART.robot()


class Biased:
    """The true CartPole, off by ``scale`` times the size of the force, so unlike in every trajectory."""

    def __init__(self, scale, robot=ROBOT):
        self.robot, self.scale = robot, scale

    def init_cache(self, n):
        return n

    def step(self, state, control, context, cache):
        delta = CART.step(state, control) - state
        return delta + self.scale * control.abs() * torch.tensor([1.0, 0.0, 0.0, 0.0]).double(), cache


class Shifted(Biased):
    """Off by the same amount everywhere, so the two kinds of error are not proportional."""

    def step(self, state, control, context, cache):
        return CART.step(state, control) - state + 1e-3, cache


class Broken(Biased):
    """Loses its first row."""

    def step(self, state, control, context, cache):
        delta, cache = super().step(state, control, context, cache)
        delta[0] = torch.nan
        return delta, cache


@pytest.fixture(scope="module")
def truth():
    states, controls = CART.record(24, 12, torch.Generator().manual_seed(0))
    return Trajectories(states, controls, {})


def test_errors_and_baselines_are_those_of_eval(truth):
    affine = affine_baseline(ROBOT, truth)
    found = compare({"a": Biased(1e-6), "b": Biased(1e-5)}, truth, horizons=(1, 5, 12, 99), affine=affine)
    assert found.horizons == (1, 5, 12)
    for model, scale in zip(found.models, (1e-6, 1e-5), strict=True):
        alone = evaluate(Biased(scale), truth, horizons=found.horizons, affine=affine)
        assert found.sigma == alone.sigma
        for row in alone.horizons:
            at = row.horizon - 1
            assert model.at_step[at] == pytest.approx(row.at_step, rel=1e-12)
            assert model.median[at] == pytest.approx(row.median, rel=1e-12)
            assert found.zero_increment[at] == pytest.approx(row.zero_increment, rel=1e-12)
            assert found.affine[at] == pytest.approx(row.affine, rel=1e-12)
            # Another draw of the same bootstrap: the ends agree to its own noise.
            assert model.low[at] == pytest.approx(row.low, rel=0.05)
            assert model.high[at] == pytest.approx(row.high, rel=0.05)


def test_a_model_with_twice_the_error_everywhere_is_twice_as_bad_without_doubt(truth):
    found = compare({"a": Biased(1e-6), "b": Biased(2e-6)}, truth, horizons=(1,))
    first, second = found.models
    assert first.high[0] / first.low[0] > 1.2  # one model alone is uncertain
    assert second.ratio[0] == pytest.approx(2, rel=1e-6)
    assert second.ratio_low[0] == pytest.approx(2, rel=1e-6)
    assert second.ratio_high[0] == pytest.approx(2, rel=1e-6)
    assert (first.ratio[0], first.ratio_low[0], first.ratio_high[0]) == (1, 1, 1)


def test_intervals_equal_a_bootstrap_written_out_draw_by_draw(truth):
    models = {"a": Biased(1e-6), "b": Shifted(0.0)}
    found = compare(models, truth, horizons=(7,), seed=5, resamples=40).models[1]
    sigma = channel_sigma(ROBOT, truth.states)
    a, b = (squared_error(model, truth, 7, sigma) for model in models.values())
    draws = torch.randint(24, (40, 24), generator=seeded_generator(5, "compare"))
    errors = torch.stack([b[draw].mean(0).sqrt() for draw in draws])
    ratios = torch.stack([(b[draw].mean(0) / a[draw].mean(0)).sqrt() for draw in draws])
    for values, low, high in ((errors, found.low, found.high), (ratios, found.ratio_low, found.ratio_high)):
        assert low == pytest.approx(values.quantile(0.025, 0).tolist(), rel=1e-9)
        assert high == pytest.approx(values.quantile(0.975, 0).tolist(), rel=1e-9)


def test_a_trajectory_that_is_lost_withholds_the_mean_and_counts_as_diverged(truth):
    model = compare({"a": Biased(1e-6), "lost": Broken(1e-6)}, truth, horizons=(3,)).models[1]
    assert model.at_step == (None,) * 3
    assert model.ratio == (None,) * 3
    assert model.high == (None,) * 3
    assert model.diverged == pytest.approx((1 / 24,) * 3)
    assert math.isfinite(model.median[2])


def test_an_observer_serves_its_own_model(truth):
    class Looker(Biased):
        def step(self, state, control, context, cache):
            assert context["wind"].tolist() == list(range(24))
            return super().step(state, control, context, cache)

    class Blind(Biased):
        def step(self, state, control, context, cache):
            assert context is None
            return super().step(state, control, context, cache)

    scenes = truth._replace(scenes={"wind": torch.arange(24)})
    found = compare({"a": Looker(0.0), "b": Blind(0.0)}, scenes, horizons=(2,), observers={"a": lambda _, scene: scene})
    assert len(found.models) == 2


def test_models_of_different_robots_are_refused(truth):
    heavy = CartPole(max_force=99.0).robot()
    with pytest.raises(ValueError, match=r"models: b is of another robot than a: .*99"):
        compare({"a": Biased(0.0), "b": Biased(0.0, heavy)}, truth)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect_cartpole(tmp_path_factory.mktemp("compare") / "data", trajectories=40, horizon=6, progress=False)


def manifest(data=None, **training):
    return {"datasets": [] if data is None else [data.digest], "training": training}


def test_only_trajectories_held_out_from_all_models_are_used(data):
    models = {"a": manifest(data, val_fraction=0.5, seed=0), "b": manifest(data, val_fraction=0.5, seed=1)}
    expected = set(split(40, 0.5, 0)[1].tolist()) & set(split(40, 0.5, 1)[1].tolist())
    assert 0 < len(expected) < 20
    rows, trained, knowing = held_out_rows(data, models | {"c": manifest()})
    assert set(rows.tolist()) == expected
    assert sorted([*rows.tolist(), *trained.tolist()]) == list(range(40))
    assert knowing == ("a", "b")


def test_a_dataset_that_no_model_was_trained_on_is_used_whole(data):
    rows, trained, knowing = held_out_rows(data, {"a": manifest(), "b": manifest(val_fraction=0.5, seed=0)})
    assert rows.tolist() == list(range(40))
    assert (len(trained), knowing) == (0, ())


def test_splits_without_a_common_held_out_trajectory_are_refused(data):
    models = {"a": manifest(data, val_fraction=0.02, seed=0), "b": manifest(data, val_fraction=0.02, seed=1)}
    with pytest.raises(ValueError, match="none of its 40 trajectories is held out from all of a, b"):
        held_out_rows(data, models)
    with pytest.raises(ValueError, match="does not tell with which split"):
        held_out_rows(data, {"a": manifest(data)})


@pytest.fixture(scope="module")
def models(data):
    """Untrained, each the affine model of its own start, one of them in a run folder."""
    root, everything = data.path.parent, data.load()
    before, controls, after = everything.states[:, :-1], everything.controls, everything.states[:, 1:]
    sizes = FlashNerdConfig(width=8, heads=2, spans=(2,), hidden=8, readout_hidden=8)
    for name, model, seed in (
        ("run/best", FlashNerd(sizes, data.robot), 0),
        ("theirs", NerdBaseline(NerdBaselineConfig(width=12, heads=2, layers=1, window=3), data.robot), 0),
        ("elsewhere", FlashNerd(sizes, data.robot), 7),
    ):
        model.fit(before.flatten(0, 1), controls.flatten(0, 1), after.flatten(0, 1))
        meta = {"datasets": [data.digest], "training": {"val_fraction": 0.1, "seed": seed}, "metrics": {}}
        (root / name).parent.mkdir(exist_ok=True)
        save_model(root / name, model, meta)
    return root


def run(*arguments):
    main(["compare", *map(str, arguments)])


def test_the_command_compares_any_streaming_models(models, data, capsys):
    run(models / "run", models / "theirs", "--dataset", data.path, "--horizons", 1, 4)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert [model["name"] for model in document["models"]] == ["run", "theirs"]
    assert [model["architecture"] for model in document["models"]] == ["flash-nerd", "nerd-baseline"]
    assert (document["num_trajectories"], document["held_out_from"]) == (4, ["run", "theirs"])
    for model in document["models"]:
        assert [row["horizon"] for row in model["horizons"]] == [1, 4]
        assert len(model["curve"]["at_step"]) == len(document["affine"]) == 4
    assert "no motion" in captured.err
    run(models / "run", "--dataset", data.path, "--horizons", 4)
    assert json.loads(capsys.readouterr().out)["models"][0]["horizons"][0]["ratio"] == 1


def test_bad_input_is_one_line_and_exit_code_2(models, data, tmp_path, capsys):
    other = CartPole(max_force=99.0)
    collect_cartpole(tmp_path / "other", trajectories=3, horizon=2, cartpole=other, progress=False)
    mine, theirs = models / "run", models / "theirs"
    for arguments, words in (
        ((mine, theirs, "--dataset", tmp_path / "nowhere"), "no such dataset manifest"),
        ((mine, tmp_path / "nowhere", "--dataset", data.path), "no such model manifest"),
        ((mine, "--dataset", tmp_path / "other"), "made for another robot"),
        ((mine, mine, "--dataset", data.path), "is given twice"),
        ((mine, models / "elsewhere", "--dataset", data.path), "is held out from all of run, elsewhere"),
        ((mine, "--dataset", data.path, "--horizons", 50), "horizons"),
        ((mine, "--dataset", data.path, "--start", 6), "start"),
        ((mine, "--dataset", data.path, "--max-trajectories", 0), "--max-trajectories"),
        ((mine, "--dataset", data.path, "--device", "toaster"), "device"),
        ((mine, "--dataset", data.path, "--plot", tmp_path / "figure.bmp"), "suffix '.bmp'"),
    ):
        with pytest.raises(SystemExit) as leaving:
            run(*arguments)
        captured = capsys.readouterr()
        assert leaving.value.code == 2
        assert captured.out == ""
        assert words in captured.err
        assert captured.err.count("\n") == 1, captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
