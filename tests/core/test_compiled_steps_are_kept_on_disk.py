"""Compiled steps: one package per graph, weights, layout and machine, in the user's cache folder."""

import pytest
import torch
from torch import nn

from nerd_core import compiled
from nerd_core.compiled import can_compile, compile_step, flat_step

needs_compiler = pytest.mark.skipif(not can_compile(), reason="no C++ compiler on this machine")


def test_compiled_steps_live_in_the_user_s_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("NERD_CACHE", str(tmp_path / "own"))
    assert compiled.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("NERD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.cache_folder() == tmp_path / "nerd"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert compiled.cache_folder().is_absolute()


class Accumulate(nn.Module):
    """Adds to a counter in place and scales its input."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x, memory):
        memory["total"].add_(x)
        return x * self.factor


def test_a_flat_step_reads_leaves_and_overwrites_its_inputs():
    step = flat_step(Accumulate(3.0), (torch.zeros(2), {"total": torch.zeros(2)}))
    total = torch.tensor([10.0, 20.0])
    (scaled,) = step([torch.tensor([1.0, 2.0]), total])
    assert scaled.tolist() == [3.0, 6.0]
    assert total.tolist() == [11.0, 22.0]


@pytest.mark.slow
@needs_compiler
def test_a_compiled_step_overwrites_its_inputs_and_another_layout_is_another_package(monkeypatch, tmp_path):
    monkeypatch.setenv("NERD_CACHE", str(tmp_path))
    step = compile_step(Accumulate(3.0), (torch.zeros(2), {"total": torch.zeros(2)}), threads=1)
    total = torch.tensor([10.0, 20.0])
    assert step([torch.tensor([1.0, 2.0]), total])[0].tolist() == [3.0, 6.0]
    assert total.tolist() == [11.0, 22.0]
    compile_step(Accumulate(3.0), (torch.zeros(2), {"total": torch.zeros(2)}), threads=1)
    assert len(list(tmp_path.iterdir())) == 1
    compile_step(Accumulate(3.0), (torch.zeros(2), {"total": torch.zeros(2, 2)[:, 0]}), threads=1)
    assert len(list(tmp_path.iterdir())) == 2
