import json
import os
import subprocess
import sys

import pytest
import torch

from nerd_core.artifact import load_model
from nerd_core.cartpole import CartPole, collect_cartpole
from nerd_core.dataset import TrajectoryDataset
from nerd_core.distributed import Group
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.storage import read_tensors, write_tensors
from nerd_core.train import TrainConfig, train

SIZES = FlashNerdConfig(width=8, heads=2, spans=(2, 3), hidden=8, readout_hidden=8)
CONFIG = TrainConfig(
    steps=8,
    recursive_steps=4,
    batch_size=8,
    window=6,
    warmup=2,
    eval_every=3,
    checkpoint_every=2,
    eval_horizons=(1, 5),
    recursive_horizon=3,
    recursive_batch=8,
    precision="float32",
    device="cpu",
    threads=1,
)

# Run by torchrun in each process; without numpy, which nerd-core must not need here either.
WORKER = """
import sys
sys.modules["numpy"] = None
from pathlib import Path
import torch
from nerd_core.cartpole import CartPole
from nerd_core.dataset import TrajectoryDataset
from nerd_core.distributed import training_group
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.run import TrainingRun
from nerd_core.storage import read_tensors, write_tensors
from nerd_core.train import TrainConfig, train

here = Path(sys.argv[1])
sizes, config = {sizes}, {config}
data = TrajectoryDataset.open(here / "data")

with training_group(torch.device("cpu")) as group:
    train(data, sizes, config, out=here / "two")

    sample = read_tensors(here / "sample.safetensors", what="sample")
    model = FlashNerd(sizes, CartPole().robot()).double()
    model.fit(*(group.share(sample[name]) for name in ("1-now", "2-control", "3-after")), total=group.total)
    write_tensors(here / f"fit-{{group.rank}}.safetensors", model.state_dict())

    try:
        group.check_equal("flag", group.rank)
    except ValueError as error:
        (here / f"refusal-{{group.rank}}").write_text(str(error))

    descend = TrainingRun.descend
    def dying(self, *arguments):
        if self.step == 5:
            raise KeyboardInterrupt
        descend(self, *arguments)
    TrainingRun.descend = dying
    try:
        train(data, sizes, config, out=here / "resumed")
    except KeyboardInterrupt:
        TrainingRun.descend = descend
    train(data, sizes, config, out=here / "resumed", resume=True)

tasks = Path("/proc/self/task")
names = [(task / "comm").read_text().strip() for task in tasks.iterdir()] if tasks.exists() else []
(here / f"threads-{{group.rank}}").write_text("\\n".join(names))
"""


def samples():
    """An odd number of transitions, so that the two shares differ in size."""
    states, controls = CartPole().record(41, 5, torch.Generator().manual_seed(3))
    now, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    return {"1-now": now, "2-control": controls.flatten(0, 1), "3-after": after}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """One torchrun of two processes on the CPU, and the same run in this process."""
    path = tmp_path_factory.mktemp("distributed")
    data = collect_cartpole(path / "data", trajectories=40, horizon=12, progress=False)
    write_tensors(path / "sample.safetensors", samples())
    (path / "worker.py").write_text(WORKER.format(sizes=SIZES, config=CONFIG))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
    ]
    done = subprocess.run(
        [*command, str(path / "worker.py"), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (path / "stderr").write_text(done.stderr)
    train(data, SIZES, CONFIG, out=path / "one", progress=False)
    return path


def test_no_thread_of_the_group_outlives_it(here):
    for rank in (0, 1):
        names = (here / f"threads-{rank}").read_text().split()
        if not names:
            pytest.skip("threads are counted in /proc, which this system has not")
        assert not [name for name in names if "gloo" in name]


def test_statistics_and_ridge_fit_equal_those_of_one_process_on_the_same_sample(here):
    alone = FlashNerd(SIZES, CartPole().robot()).double()
    alone.fit(*samples().values())
    found = [read_tensors(here / f"fit-{rank}.safetensors", what="fit") for rank in (0, 1)]
    for name in ("token_stats.mean", "token_stats.std", "target_stats.mean", "target_stats.std"):
        torch.testing.assert_close(found[0][name], alone.state_dict()[name], rtol=1e-12, atol=1e-14)
    for name in ("token_stats.active", "target_stats.active"):
        assert torch.equal(found[0][name], alone.state_dict()[name])
    # The normal equations are as exact; solving them costs some digits.
    torch.testing.assert_close(found[0]["affine.weight"], alone.affine.weight.detach(), rtol=1e-10, atol=1e-12)
    for name, tensor in found[0].items():
        if "stats" in name or "affine" in name:
            assert torch.equal(tensor, found[1][name]), name


def test_weights_after_both_phases_are_those_of_one_process_with_the_same_global_batch(here):
    # Sums over two halves of a batch are rounded otherwise than sums over the whole: 1e-7 of a gradient per update.
    # AdamW divides by the gradient's own size, so a weight moves by at most that share of its learning rate's 1e-3
    # per update, more only where a gradient is itself near zero.
    two, one = load_model(here / "two" / "best")[0], load_model(here / "one" / "best")[0]
    for name, expected in one.state_dict().items():
        if "stats" in name:
            assert torch.equal(two.state_dict()[name], expected), name
        torch.testing.assert_close(two.state_dict()[name], expected, rtol=0, atol=1e-5, msg=name)
    moved = float(one.readout_out.weight.detach().abs().max())
    assert moved > 1e-3  # from zero: the tolerance is a hundredth of what training did


def test_metrics_are_those_of_one_process_and_the_loss_is_the_mean_over_both(here):
    rows = {
        name: [json.loads(line) for line in (here / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    }
    assert [row["step"] for row in rows["two"]] == [3, 6, 8, 9, 12]
    for one, two in zip(rows["one"], rows["two"], strict=True):
        for key in ("loss", "val_loss", "rollout_error_mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-4), key


def test_a_resumed_run_of_two_processes_ends_with_the_same_bits(here):
    for file in ("last/checkpoint.safetensors", "best/weights.safetensors", "metrics.jsonl"):
        assert (here / "resumed" / file).read_bytes() == (here / "two" / file).read_bytes(), file


def test_only_the_first_process_speaks_and_no_process_is_left_out_of_an_agreement(here):
    assert (here / "stderr").read_text().count("train 12/12") == 2  # the first run and the resumed one
    for rank in (0, 1):
        assert "flag: not the same in all 2 processes" in (here / f"refusal-{rank}").read_text()


def test_a_run_of_two_processes_is_not_resumed_by_one(here):
    with pytest.raises(ValueError, match="processes: 2, not 1"):
        train(TrajectoryDataset.open(here / "data"), SIZES, CONFIG, out=here / "two", resume=True, progress=False)


def test_shares_are_disjoint_complete_and_of_one_size():
    groups = [Group(rank=rank, size=3) for rank in range(3)]
    rows = torch.arange(12)
    assert sorted(torch.cat([group.share(rows) for group in groups]).tolist()) == rows.tolist()
    with pytest.raises(ValueError, match="batch_size: got 10, expected a multiple of the 3 processes"):
        groups[0].check_divides("batch_size", 10)
