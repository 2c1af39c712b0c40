"""nerd-core bench: what it prints, what it refuses, and how its figures follow from the times."""

import json
from types import SimpleNamespace

import pytest
import torch

from nerd_core import FlashNerd, FlashNerdConfig, NerdBaseline, NerdBaselineConfig, bench, save_model, streaming
from nerd_core.bench import Contender, example_inputs, full_history, one_step_error, reference_of
from nerd_core.cartpole import CartPole
from nerd_core.cli import main
from nerd_core.roofline import Machine, step_cost

ROBOT = CartPole().robot()
SMALL = FlashNerdConfig(width=8, heads=2, spans=(2, 2), hidden=8, readout_hidden=8)
SMALL_NERD = NerdBaselineConfig(width=8, heads=2, layers=2, window=3, block=3, head_hidden=8)
QUICK = ["--seconds", "0.002", "--repeats", "2", "--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing is compiled, and the peaks are given: this is about the figures, not about speed."""
    monkeypatch.setattr(streaming, "can_compile", lambda: False)
    peaks = Machine(flops_per_second=1e9, bytes_per_second=1e9)
    monkeypatch.setattr(bench, "measure_machine", lambda device: peaks)


def test_without_models_ours_and_the_baseline_are_measured_in_every_form(capsys):
    sizes = ["--flash.width", "8", "--flash.heads", "2", "--flash.spans", "2", "2"]
    sizes += ["--nerd.width", "8", "--nerd.heads", "2", "--nerd.layers", "1"]
    main(["bench", "--batch", "1", "3", *QUICK, *sizes])
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert [m["architecture"] for m in document["models"]] == ["FlashNerd", "NerdBaseline"]
    assert document["reference"] == "nerd-baseline 8 × 1"
    rows = document["measurements"]
    assert [(r["batch"], r["form"]) for r in rows[::2]] == [
        (1, "eager"), (1, "compiled"), (3, "eager"), (3, "compiled"),
    ]  # fmt: skip
    for row in rows:
        assert row["low"] <= row["steps_per_s"] <= row["high"]
        assert row["steps_per_s"] * row["ms_per_step"] == pytest.approx(1e3 * row["batch"])
    assert all(row["ratio"] == 1.0 for row in rows[1::2])
    for model in document["models"]:
        assert model["cache_bytes_per_world"]["formula"] == model["cache_bytes_per_world"]["measured"]
    assert document["machine"]["torch"] == torch.__version__
    for words in ("measuring the machine's peaks", "compiled, batch 3: preparing", "steps/s", "roofline"):
        assert words in err


def test_a_model_folder_is_measured_beside_a_baseline_for_its_robot(tmp_path, capsys):
    path = save_model(tmp_path / "model", FlashNerd(SMALL, ROBOT))
    main(["bench", str(path), "--batch", "2", "--forms", "eager", *QUICK, "--nerd.width", "12", "--nerd.layers", "1"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [m["name"] for m in document["models"]] == [str(path), "nerd-baseline 12 × 1"]
    main(["bench", str(path), "--batch", "2", "--forms", "eager", *QUICK, "--no-baseline"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [m["name"] for m in document["models"]] == [str(path)]
    assert document["measurements"][0]["ratio"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "16", "0"], "batch is 0, expected at least 1"),
        (["--repeats", "0"], "repeats is 0, expected at least 1"),
        (["--threads", "-1"], "threads is -1, expected at least 1"),
        (["--seconds", "nan"], "seconds is nan, expected a positive time"),
        (["no-such-folder"], "no such model manifest"),
        (["--device", "toaster"], "device: got 'toaster'"),
        (["--flash.width", "10", "--flash.heads", "3"], "width is 10, expected a multiple of heads (3)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_a_broken_model_folder_is_one_line(tmp_path, capsys):
    path = save_model(tmp_path / "model", FlashNerd(SMALL, ROBOT))
    (path / "weights.safetensors").write_bytes(b"short")
    with pytest.raises(SystemExit) as end:
        main(["bench", str(path), *QUICK])
    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_figures_follow_from_the_times():
    model = FlashNerd(SMALL, ROBOT)
    runner = SimpleNamespace(name="m", form="eager", batch=10, threads=1, chunk=None, steps=4, model=model)
    peaks = Machine(flops_per_second=1e3, bytes_per_second=1e9)
    row = bench._measurement(runner, [1.0, 2.0, 4.0], [4.0, 2.0, 40.0], peaks)
    assert (row.steps_per_s, row.low, row.high, row.ms_per_step) == (5.0, 2.5, 10.0, 2000.0)
    assert row.ratio == 4.0  # of 4, 1 and 10: pair by pair, not of the medians
    assert row.timed_steps == 12
    flops = step_cost(model).flops
    assert row.flops_per_s == pytest.approx(5 * flops)
    assert row.roofline == pytest.approx(5 * flops / 1e3)  # these peaks bound it by arithmetic


def test_ratios_are_to_the_first_baseline_or_else_the_first_model():
    ours, theirs = Contender("a", FlashNerd(SMALL, ROBOT)), Contender("b", NerdBaseline(SMALL_NERD, ROBOT))
    assert reference_of([ours, theirs]) == 1
    assert reference_of([ours, ours]) == 0


def test_histories_are_full_before_the_clock_starts():
    for model in (FlashNerd(SMALL, ROBOT), NerdBaseline(SMALL_NERD, ROBOT)):
        cache = full_history(model, 5, torch.device("cpu"))
        assert cache.valid.tolist() == [3] * 5  # both see three frames


def test_inputs_are_proper_states():
    state, control = example_inputs(ROBOT, 64, torch.device("cpu"))
    assert state.shape == (64, 4)
    assert control.abs().max() <= 1500
    assert control.abs().max() > 1000


def test_the_error_of_bfloat16_is_measured_against_float32():
    model = FlashNerd(SMALL, ROBOT)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    assert one_step_error(model, "float32") == 0.0
    # Eight bits of mantissa in the blocks, none lost in the readout.
    assert 1e-6 < one_step_error(model, "bfloat16") < 0.1
