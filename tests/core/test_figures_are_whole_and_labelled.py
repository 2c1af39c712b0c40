import sys
import warnings

import pytest

from nerd_core.cartpole import collect_cartpole
from nerd_core.cli import main
from nerd_core.comparison import Comparison, ModelErrors
from nerd_core.coverage import coverage, inspect_dataset
from nerd_core.figures import check_plot, comparison_figure, coverage_figure, save_figure, training_figure
from nerd_core.inspection import RunReport


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return collect_cartpole(tmp_path_factory.mktemp("figures") / "data", trajectories=5, horizon=8, progress=False)


def run_report(*evaluations, boundary=20):
    return RunReport(
        robot="cartpole",
        robot_digest="",
        datasets=(),
        settings={},
        architecture="flash-nerd",
        model={},
        context=None,
        init_from=None,
        step=30,
        total_steps=30,
        boundary=boundary,
        checkpoint_step=None,
        evaluations=evaluations,
        cut_short=False,
        best=min(
            (e for e in evaluations if e["rollout_error_mean"]), key=lambda e: e["rollout_error_mean"], default=None
        ),
        best_model=True,
    )


def evaluation(step, phase, error):
    return {
        "step": step,
        "phase": phase,
        "lr": 1e-3 / step,
        "loss": error,
        "val_loss": error,
        "rollout_error": {"1": error, "15": error and 10 * error},
        "rollout_error_mean": error,
    }


def errors(name, *curve):
    blank = (None,) * len(curve)
    return ModelErrors(
        name=name,
        at_step=curve,
        low=curve,
        high=curve,
        median=curve,
        diverged=(0.0,) * len(curve),
        ratio=blank,
        ratio_low=blank,
        ratio_high=blank,
    )


def comparison(*models):
    return Comparison(
        horizons=(1, 3),
        models=models,
        zero_increment=(1.0, 1.5, 2.0),
        affine=(0.5, 0.6, 0.7),
        sigma={},
        idle_channels=(),
        num_trajectories=25,
        start=0,
    )


def curves(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_comparison_shows_every_curve_over_all_steps_on_logarithmic_axes():
    (axes,) = comparison_figure(comparison(errors("a", 0.1, 0.2, 0.3), errors("b", 0.2, 0.4, 0.9))).axes
    shown = curves(axes)
    assert shown["a"] == ([1, 2, 3], [0.1, 0.2, 0.3])
    assert shown["b"] == ([1, 2, 3], [0.2, 0.4, 0.9])
    assert shown["no motion"][1] == [1.0, 1.5, 2.0]
    assert shown["affine"][1] == [0.5, 0.6, 0.7]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(axes.collections) == 2  # one band each
    looks = {(line.get_color(), str(line.get_linestyle())) for line in axes.get_lines()}
    assert len({colour for colour, _ in looks}) == 3  # two models, and grey for the baselines


def test_a_run_shows_losses_errors_rates_and_where_the_phase_changes():
    rows = (evaluation(10, "teacher", 0.4), evaluation(20, "teacher", 0.3), evaluation(30, "recursive", 0.2))
    losses, horizons, rates = training_figure(run_report(*rows)).axes
    assert curves(losses)["held out, one step"] == ([10, 20, 30], [0.4, 0.3, 0.2])
    assert curves(losses)["training, teacher-forced"] == ([10, 20], [0.4, 0.3])
    assert curves(losses)["training, recursive"] == ([30], [0.2])
    assert curves(horizons)["$E_{15}$"] == ([10, 20, 30], [4.0, 3.0, 2.0])
    assert curves(horizons)["best"] == ([30], [0.2])
    assert horizons.get_ylabel() == "held-out rollout error [σ]"
    assert rates.get_xlabel() == "updates (of 30)"
    for axes in (losses, horizons, rates):
        assert [line.get_xdata()[0] for line in axes.get_lines() if list(line.get_xdata()) == [20, 20]] == [20]


def test_a_dataset_shows_each_channel_with_its_unit_and_the_first_position_against_its_velocity(data):
    report = inspect_dataset(data.path)
    axes = coverage_figure(report, coverage(data, report)).axes
    titled = {a.get_title(): a.get_xlabel() for a in axes if a.get_title()}
    assert titled == {"rail": "[m]", "hinge": "[rad]", "rail_vel": "[m/s]", "hinge_vel": "[rad/s]", "rail_ctrl": "[N]"}
    (plane,) = [a for a in axes if a.get_xlabel() == "rail [m]"]
    assert plane.get_ylabel() == "rail_vel [m/s]"
    (mesh,) = plane.collections
    assert int(mesh.get_array().sum()) == 5 * 9  # every frame


def test_gaps_and_curves_without_any_number_draw_without_a_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(comparison_figure(comparison(errors("gone", None, None, None))), tmp_path / "a.png")
        rows = (evaluation(10, "teacher", None), evaluation(20, "teacher", 0.3))
        save_figure(training_figure(run_report(*rows, boundary=None)), tmp_path / "b.png")
        save_figure(training_figure(run_report(rows[0], boundary=None)), tmp_path / "c.png")
    assert curves(training_figure(run_report(*rows)).axes[1])["$E_{1}$"][1][1] == 0.3


def test_a_run_without_evaluations_has_no_figure():
    with pytest.raises(ValueError, match="no evaluation yet"):
        training_figure(run_report())


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_gives_the_format_and_the_same_figure_the_same_bytes(tmp_path, suffix, start):
    for name in ("a", "b"):
        save_figure(comparison_figure(comparison(errors("m", 0.1, 0.2, 0.3))), tmp_path / f"{name}.{suffix}")
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
    assert first.startswith(start)
    assert first == second
    assert len(list(tmp_path.iterdir())) == 2


def test_a_path_that_cannot_take_a_figure_is_refused_before_anything_is_done(data, tmp_path, capsys):
    taken = tmp_path / "taken.png"
    taken.write_bytes(b"mine")
    for path, words in (
        (taken, "is never overwritten"),
        (tmp_path / "nowhere" / "figure.png", "is no folder"),
        (taken / "figure.png", "is no folder"),
        (tmp_path / "figure.gif", "suffix '.gif', expected one of .png, .svg, .pdf"),
        (tmp_path / "figure", "suffix ''"),
    ):
        with pytest.raises(SystemExit) as leaving:
            main(["inspect", str(data.path), "--plot", str(path)])
        captured = capsys.readouterr()
        assert leaving.value.code == 2
        assert captured.out == ""
        assert words in captured.err
        assert captured.err.count("\n") == 1, captured.err
    assert taken.read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == ["taken.png"]


def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"install nerd-core\[plot\]"):
        check_plot(tmp_path / "figure.png")


def test_the_command_writes_the_figure_beside_its_tables(data, tmp_path, capsys):
    main(["inspect", str(data.path), "--plot", str(tmp_path / "figure.png")])
    assert "figure.png" in capsys.readouterr().err
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
