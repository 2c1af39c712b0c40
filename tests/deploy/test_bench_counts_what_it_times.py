import json

import pytest

from nerd_deploy import OnnxStep
from nerd_deploy.bench import bench_artifact
from nerd_deploy.cli import main


def test_a_row_per_batch_size_with_percentiles_in_order(walker_nerd, capsys):
    main(["bench", str(walker_nerd[1]), "--batches", "1", "3", "--steps", "1000", "--warmup", "5"])
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert (found["command"], found["backend"], found["inputs"]) == ("bench", "ort-cpu", "golden")
    assert [row["batch"] for row in found["batches"]] == [1, 3]
    for row in found["batches"]:
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["max_us"]
        assert row["p99_9_us"] is None  # a single step of a thousand lies beyond it
        assert row["steps_per_s"] == pytest.approx(1e6 * row["batch"] / row["mean_us"])
    assert {"nerd-deploy", "onnxruntime", "numpy"} == set(found["versions"])
    assert "p99.9" in captured.err


def test_warm_up_is_not_timed(cartpole, monkeypatch):
    calls = []
    step = OnnxStep.step

    def counted(self, *arguments, **settings):
        calls.append(self.n)
        return step(self, *arguments, **settings)

    monkeypatch.setattr(OnnxStep, "step", counted)
    now = iter(range(10**6))
    monkeypatch.setattr("nerd_deploy.bench.time.perf_counter", lambda: float(next(now)))
    found = bench_artifact(cartpole[1], batches=(2,), steps=20, warmup=7)
    assert calls == [2] * 27
    assert found["inputs"] == "zeros"
    row = found["batches"][0]
    assert (row["p50_us"], row["mean_us"], row["p90_us"], row["steps_per_s"]) == (1e6, 1e6, None, 2.0)


def test_settings_out_of_range_are_refused(cartpole):
    for settings, words in (
        ({"batches": ()}, "batches is"),
        ({"batches": (0,)}, "batches is"),
        ({"steps": 0}, "steps is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"backend": "abacus"}, "backend is 'abacus'"),
    ):
        with pytest.raises(ValueError, match=words):
            bench_artifact(cartpole[1], **settings)
