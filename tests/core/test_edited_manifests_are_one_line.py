"""An edited manifest is a ValueError that names the file, whatever was edited."""

import json

import pytest
import torch

from nerd_core import FlashNerd, FlashNerdConfig, TrajectoryDataset, load_model, save_model
from nerd_core.cartpole import collect_cartpole

META = {"datasets": [], "training": {}, "metrics": {}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return collect_cartpole(tmp_path_factory.mktemp("data") / "cartpole", trajectories=8, horizon=6, seed=0)


def edited(path, key, value):
    manifest = json.loads(path.read_text())
    *parents, last = key.split(".")
    place = manifest
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    if value is None:
        place.pop(last)
    else:
        place[last] = value
    path.write_text(json.dumps(manifest))


MODEL_EDITS = [
    ("parameters", None),
    ("name", None),
    ("metrics", 3),
    ("datasets", None),
    ("config", 1),
    ("config.width", "128"),
    ("config.spans", 3),
    ("context", "contact-set"),
    ("robot", 1),
    ("format_version", 99),
]


@pytest.mark.parametrize(("key", "value"), MODEL_EDITS)
def test_a_model_whose_manifest_was_edited_is_refused(tmp_path, dataset, key, value):
    torch.manual_seed(0)
    model = FlashNerd(FlashNerdConfig(width=8, heads=2, spans=(2,), hidden=8), dataset.robot)
    save_model(tmp_path / "model", model, META)
    load_model(tmp_path / "model")
    edited(tmp_path / "model" / "manifest.json", key, value)
    with pytest.raises(ValueError, match=":"):
        load_model(tmp_path / "model")


DATASET_EDITS = [
    ("shapes", {}),
    ("shards", ["x"]),
    ("shards", []),
    ("shards.0.sha256", None),
    ("shards.0.rows", 3),
    ("shapes.control.shape", [50, 1]),
    ("engine", None),
    ("extra", None),
    ("robot", 1),
    ("format_version", 99),
]


@pytest.mark.parametrize(("key", "value"), DATASET_EDITS)
def test_a_dataset_whose_manifest_was_edited_is_refused(tmp_path, dataset, key, value):
    copy = tmp_path / "data"
    copy.mkdir()
    for file in dataset.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    TrajectoryDataset.open(copy).load()
    edited(copy / "manifest.json", key, value)
    with pytest.raises(ValueError, match=":"):
        TrajectoryDataset.open(copy).load()
