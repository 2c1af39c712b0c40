import os
import signal
import subprocess
import sys
import time

import pytest

from nerd_core.cli import main
from nerd_core.dataset import TrajectoryDataset

COLLECT = ("collect-cartpole", "--trajectories", "16000", "--horizon", "20")
# 30 and 7: a checkpoint hardly ever meets an evaluation, so the killed run is behind its own metrics.
SIZES = ("--width", "8", "--heads", "2", "--spans", "2", "2", "--hidden", "8", "--readout-hidden", "8")
TRAIN = (*SIZES, "--steps", "300", "--recursive-steps", "30", "--recursive-horizon", "3", "--recursive-batch", "8")
TRAIN = (*TRAIN, "--window", "4", "--batch-size", "8", "--eval-every", "30", "--checkpoint-every", "7")
TRAIN = (*TRAIN, "--eval-horizons", "1", "5", "--threads", "1", "--device", "cpu", "--precision", "float32")


def kill_when(arguments, grown):
    """Start a nerd-core command and kill it, wherever it is, as soon as its files have grown that far."""
    command = [sys.executable, "-m", "nerd_core.cli", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not grown() and process.poll() is None:
        time.sleep(0.002)  # between two looks; what is waited for is the file
    process.kill()
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "cartpole"
    main(["collect-cartpole", "--out", str(path), "--trajectories", "40", "--horizon", "12"])
    return path


def test_training_that_was_killed_for_real_ends_with_the_same_bits(data, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main(["train", str(data), "--out", str(whole), *TRAIN])
    metrics = killed / "metrics.jsonl"
    kill_when(["train", data, "--out", killed, *TRAIN], lambda: metrics.exists() and metrics.stat().st_size > 0)
    main(["train", str(data), "--out", str(killed), *TRAIN, "--resume"])
    for file in ("best/weights.safetensors", "best/manifest.json", "last/checkpoint.safetensors", "metrics.jsonl"):
        assert (killed / file).read_bytes() == (whole / file).read_bytes(), file


def test_a_recording_that_was_killed_for_real_ends_with_the_same_digest(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main([*COLLECT, "--out", str(whole)])
    kill_when([*COLLECT, "--out", killed], (killed / "shard-00001.safetensors").exists)
    with pytest.raises(ValueError, match="incomplete"):
        TrajectoryDataset.open(killed)
    main([*COLLECT, "--out", str(killed), "--resume"])
    assert TrajectoryDataset.open(killed).digest == TrajectoryDataset.open(whole).digest
    assert sorted(f.name for f in killed.iterdir()) == sorted(f.name for f in whole.iterdir())
