import json
import shutil

import pytest
import torch

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig, save_model
from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.cli import main
from nerd_core.dataset import TrajectoryDataset
from nerd_core.inspection import inspect_model, inspect_run, kind_of
from nerd_core.train import TrainConfig, train

ROBOT = CartPole().robot()
SIZES = FlashNerdConfig(width=8, heads=2, spans=(3, 2), hidden=8, readout_hidden=8)
SETTINGS = TrainConfig(
    steps=4,
    recursive_steps=2,
    recursive_horizon=3,
    recursive_batch=4,
    window=6,
    batch_size=4,
    warmup=1,
    eval_every=2,
    eval_horizons=(1, 5),
    checkpoint_every=3,
    val_fraction=0.2,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect_cartpole(tmp_path_factory.mktemp("inspect") / "data", trajectories=20, horizon=10, progress=False)


@pytest.fixture(scope="module")
def finished(data):
    train(data, SIZES, SETTINGS, out=data.path.parent / "run", progress=False)
    return data.path.parent / "run"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def evaluation(step, error):
    return {
        "step": step,
        "phase": "teacher",
        "lr": 1e-3,
        "loss": 0.1,
        "val_loss": 0.1,
        "rollout_error": {"1": error},
        "rollout_error_mean": error,
    }


def write_metrics(run, *rows, tail=""):
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_a_finished_run_tells_its_settings_progress_and_best(run, data):
    report = inspect_run(run)
    assert (report.step, report.total_steps, report.boundary, report.checkpoint_step) == (6, 6, 4, 6)
    assert [row["step"] for row in report.evaluations] == [2, 4, 6]
    assert report.best == min(report.evaluations, key=lambda row: row["rollout_error_mean"])
    assert (report.best_model, report.cut_short) == (True, False)
    assert report.datasets == (data.digest,)
    assert (report.robot, report.robot_digest) == ("cartpole", ROBOT.digest())
    assert report.settings["recursive_horizon"] == 3
    assert (report.architecture, report.model["spans"]) == ("flash-nerd", [3, 2])


def test_a_run_of_one_phase_has_no_boundary(run):
    config = json.loads((run / "config.json").read_text())
    config["train"]["recursive_steps"] = 0
    (run / "config.json").write_text(json.dumps(config))
    report = inspect_run(run)
    assert (report.total_steps, report.boundary) == (4, None)


def test_a_run_killed_before_its_first_checkpoint_can_be_read(run):
    shutil.rmtree(run / "last")
    shutil.rmtree(run / "best")
    (run / "metrics.jsonl").unlink()
    report = inspect_run(run)
    assert (report.step, report.checkpoint_step, report.best, report.evaluations) == (0, None, None, ())


def test_a_line_cut_short_by_a_kill_is_said_and_a_broken_one_before_is_refused(run):
    write_metrics(run, evaluation(2, 0.5), evaluation(40, 0.4), tail='{"step": 42, "pha')
    report = inspect_run(run)
    assert report.cut_short
    assert (len(report.evaluations), report.step, report.best["step"]) == (2, 40, 40)
    (run / "metrics.jsonl").write_text("{\n" + json.dumps(evaluation(2, 0.5)) + "\n")
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        inspect_run(run)


def test_the_best_evaluation_is_the_least_finite_one(run):
    write_metrics(run, evaluation(1, 0.5), evaluation(2, None), evaluation(3, 0.2), evaluation(4, 0.3))
    assert inspect_run(run).best["step"] == 3
    write_metrics(run, evaluation(1, None))
    assert inspect_run(run).best is None


def test_a_damaged_checkpoint_or_settings_file_is_named(run):
    checkpoint = run / "last" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors: this checkpoint is damaged"):
        inspect_run(run)
    (run / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json: not readable"):
        inspect_run(run)


def test_folders_are_told_apart(run, data):
    assert [kind_of(path) for path in (data.path, run, run / "best")] == ["dataset", "run", "model"]


def test_a_models_cache_is_that_of_hand_arithmetic(tmp_path):
    sizes = FlashNerdConfig(width=16, heads=2, spans=(4, 1, 3), hidden=8)
    save_model(tmp_path / "ours", FlashNerd(sizes, ROBOT))
    report = inspect_model(tmp_path / "ours")
    assert report.cache_bytes_formula == (4 + 1 + 3) * 2 * 16 * 4 == 1024
    assert report.cache_bytes == 1024 + 8
    assert report.receptive_field == 1 + 3 + 0 + 2
    assert sum(report.parts.values()) == report.parameters == FlashNerd(sizes, ROBOT).num_parameters
    theirs = NerdBaseline(NerdBaselineConfig(width=12, heads=2, layers=1, window=5), ROBOT)
    save_model(tmp_path / "theirs", theirs)
    report = inspect_model(tmp_path / "theirs")
    # Tokens of CartPole: x, sin θ, cos θ, ẋ, θ̇ and the force.
    assert (report.cache_bytes_formula, report.cache_bytes) == (None, 5 * 6 * 4 + 8)
    assert (report.architecture, report.receptive_field) == ("nerd-baseline", 5)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = FlashNerd(SIZES, ROBOT)
    with torch.no_grad():
        model.embed.weight[0, 0] = torch.nan
    save_model(tmp_path / "model", model)
    with pytest.raises(ValueError, match=r"'embed\.weight' hold 1 number that is not finite"):
        inspect_model(tmp_path / "model")


def test_the_command_prints_tables_and_one_json_document(finished, data, capsys):
    main(["inspect", str(finished)])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["kind"], document["step"], document["total_steps"]) == ("run", 6, 6)
    for words in (
        "update 6 of 6 (100%)",
        "from update 4",
        "recursive",
        "E_5",
        "*",
        TrajectoryDataset.open(data.path).digest,
    ):
        assert words in captured.err
    main(["inspect", str(finished / "best")])
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["kind"], document["cache_bytes_formula"]) == ("model", 5 * 2 * 8 * 4)
    assert "(3 + 2) · 2 · 8 · 4 B = 320 B" in captured.err
