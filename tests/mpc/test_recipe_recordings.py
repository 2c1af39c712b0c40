"""What the recipe records depends on its sizes and seeds; how many processes record at once does not matter."""

import subprocess

import pytest

from nerd_mpc import recipe
from nerd_mpc.recipe import RecipeConfig, run_recipe


class _Recorder:
    """In place of a recording process: remembers its command, ends at once."""

    def __init__(self, started, code):
        self.started, self.code = started, code

    def __call__(self, command, env):
        self.started.append(tuple(command[3:]))
        return self

    def wait(self):
        return self.code


def _record(monkeypatch, out, workers, code=0):
    started = []
    monkeypatch.setattr(subprocess, "Popen", _Recorder(started, code))
    config = RecipeConfig(random_shards=5, parts=3, seed=7)
    recipe._record_all(out, "random", config, 5, config.seed, workers, None)
    return started


def test_the_number_of_workers_changes_no_recording(monkeypatch, tmp_path):
    one, many = (_record(monkeypatch, tmp_path / "data", workers) for workers in (1, 4))
    assert sorted(one) == sorted(many)
    # Five shards in three parts, a seed each.
    assert [command[-2:] for command in sorted(one)] == [("2", "7"), ("2", "8"), ("1", "9")]


def test_a_recording_that_fails_stops_the_recipe(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="exit code 3"):
        _record(monkeypatch, tmp_path / "data", 2, code=3)


@pytest.mark.parametrize(("parts", "workers"), [(0, 1), (2, 0)])
def test_no_parts_or_no_workers_are_refused_before_anything_is_written(parts, workers, tmp_path):
    with pytest.raises(ValueError, match="expected at least 1"):
        run_recipe(tmp_path / "out", RecipeConfig(parts=parts), workers=workers)
    assert not (tmp_path / "out").exists()
