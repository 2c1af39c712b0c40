import json
import math
import shutil

import pytest
import torch

from nerd_core.cartpole import CartPole
from nerd_core.cli import main
from nerd_core.coverage import channel_units, coverage, inspect_dataset
from nerd_core.dataset import TrajectoryDataset, TrajectoryWriter
from nerd_core.evaluate import channel_names, state_channels
from nerd_core.robot import Body, Joint, RobotSpec
from nerd_core.storage import sha256_of, write_tensors

ROBOT = CartPole().robot()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three shards of different sizes; the cart stands far from the origin, its speed never changes."""
    path, draw = tmp_path_factory.mktemp("data") / "cart", torch.Generator().manual_seed(0)
    with TrajectoryWriter(path, ROBOT, engine={"name": "dice", "version": 7}, seed=3) as writer:
        for rows in (5, 1, 9):
            state = torch.randn(rows, 4, 4, generator=draw) * torch.tensor([1e-2, 3.0, 0.0, 7.0])
            state += torch.tensor([1000.0, 0.0, 0.25, 0.0])
            control = 100 * torch.randn(rows, 3, 1, generator=draw)
            writer.reject("too fast", rows)
            writer.append(state, control, {"boxes": torch.rand(rows, 2, 3, generator=draw), "kind": torch.arange(rows)})
    return path


def everything(path):
    data = TrajectoryDataset.open(path).load()
    states = state_channels(ROBOT, data.states.double()).flatten(0, 1)
    return states, data.controls.double().flatten(0, 1), data.scenes


def test_statistics_over_shards_are_those_of_all_frames_at_once(folder):
    report, (states, controls, _) = inspect_dataset(folder), everything(folder)
    found = (*report.states, *report.controls)
    assert [c.name for c in found] == [*channel_names(ROBOT), "rail_ctrl"]
    assert [c.unit for c in found] == ["m", "rad", "m/s", "rad/s", "N"]
    columns = [*states.T, *controls.T]
    for channel, values in zip(found, columns, strict=True):
        assert channel.min == float(values.min())
        assert channel.max == float(values.max())
        assert channel.mean == pytest.approx(float(values.mean()), rel=1e-12, abs=1e-12)
        assert channel.std == pytest.approx(float(values.std()), rel=1e-9, abs=1e-9)
    assert [c.name for c in found if c.idle] == ["rail_vel"]


def test_facts_are_those_of_the_manifest(folder):
    report = inspect_dataset(folder)
    assert (report.trajectories, report.horizon, report.transitions) == (15, 3, 45)
    assert report.rejected == {"too fast": 15}
    assert report.engine == {"name": "dice", "version": 7}
    assert (report.seed, report.robot, report.dt) == (3, "cartpole", pytest.approx(1 / 60))
    assert report.digest == TrajectoryDataset.open(folder).digest
    assert [shard["rows"] for shard in report.shards] == [5, 1, 9]
    assert [shard["bytes"] for shard in report.shards] == [p.stat().st_size for p in sorted(folder.glob("shard-*"))]


def test_surroundings_have_shapes_and_ranges(folder):
    boxes, kind = inspect_dataset(folder).scenes
    scenes = everything(folder)[2]
    assert (boxes.name, boxes.shape, boxes.dtype) == ("boxes", (2, 3), "float32")
    assert (boxes.min, boxes.max) == (float(scenes["boxes"].min()), float(scenes["boxes"].max()))
    assert (kind.shape, kind.dtype, kind.min, kind.max) == ((), "int64", 0, 8)


def test_histograms_count_every_frame_once_in_its_own_bin(folder):
    report, (states, controls, _) = inspect_dataset(folder), everything(folder)
    found = coverage(TrajectoryDataset.open(folder), report, bins=8)
    assert found.counts.sum(1).tolist() == [60, 60, 60, 60, 45]
    for counts, values in zip(found.counts, [*states.T, *controls.T], strict=True):
        if values.max() > values.min():
            assert counts.tolist() == torch.histc(values, 8, float(values.min()), float(values.max())).tolist()
        else:
            assert counts.tolist() == [60, 0, 0, 0, 0, 0, 0, 0]
    assert torch.equal(found.plane.sum(1), found.counts[found.position])
    assert torch.equal(found.plane.sum(0), found.counts[found.velocity])
    assert (report.states[found.position].name, report.states[found.velocity].name) == ("rail", "rail_vel")


def test_units_follow_the_joints_the_base_and_the_control_law():
    robot = RobotSpec(
        name="box",
        floating=True,
        bodies=(Body(name="base", parent=-1), Body(name="wheel", parent=0), Body(name="lift", parent=0)),
        joints=(
            Joint(name="axle", kind="hinge", body=1, axis=(0.0, 1.0, 0.0)),
            Joint(name="mast", kind="slide", body=2, axis=(0.0, 0.0, 1.0)),
        ),
        control="effort",
        actuated=(1, 0),
        ctrl_range=((-1.0, 1.0),) * 2,
        effort_limit=(1.0, 1.0),
        timestep=0.01,
        substeps=1,
    )
    units = dict(zip((*channel_names(robot), "push", "turn"), channel_units(robot), strict=True))
    assert [units[name] for name in ("position_world_z", "rotation_x", "axle", "mast")] == ["m", "rad", "rad", "m"]
    assert [units[name] for name in ("linvel_world_y", "angvel_base_y", "axle_vel", "mast_vel")] == [
        "m/s",
        "rad/s",
        "rad/s",
        "m/s",
    ]
    assert (units["push"], units["turn"]) == ("N", "N m")


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    assert leaving.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_the_last_line_is_one_json_document(folder, capsys):
    main(["inspect", str(folder)])
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert (document["command"], document["kind"], document["verified"]) == ("inspect", "dataset", True)
    assert document["states"][2]["idle"] is True
    for words in ("rail_vel (idle)", "rad/s", "too fast", "50.00%", "boxes", "[2, 3]", "shard-00002.safetensors"):
        assert words in captured.err


def test_a_truncated_shard_is_named(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    shard = copy / "shard-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])
    assert "shard-00002.safetensors: truncated" in refused(capsys, copy)


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        ("state", math.nan, "state hinge_vel holds 2 numbers that are not finite, the first in trajectory 4"),
        ("control", -math.inf, "control rail_ctrl holds 2 numbers"),
        ("scene.boxes", math.nan, "scene.boxes holds 2 numbers"),
    ],
)
def test_numbers_that_are_not_finite_are_found_in_their_shard(folder, tmp_path, capsys, tensor, value, words):
    """A foreign recorder wrote them: sizes and SHA-256 agree with the manifest."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    shard = TrajectoryDataset.open(copy).load_shard(2)
    tensors = {"state": shard.states, "control": shard.controls, "scene.boxes": shard.scenes["boxes"]}
    tensors = {name: values.clone() for name, values in tensors.items()} | {"scene.kind": shard.scenes["kind"]}
    tensors[tensor][4, 1, -1] = tensors[tensor][7, 0, -1] = value
    write_tensors(copy / "shard-00002.safetensors", tensors)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["shards"][2]["sha256"] = sha256_of(copy / "shard-00002.safetensors")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    message = refused(capsys, copy)
    assert "shard-00002.safetensors" in message
    assert words in message


def test_what_is_no_artifact_is_refused(folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"format": "shopping-list"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    assert "does not exist" in refused(capsys, tmp_path / "nowhere")
    assert "is a file" in refused(capsys, folder / "manifest.json")
    assert "holds no manifest.json" in refused(capsys, tmp_path / "empty")
    assert "'shopping-list'" in refused(capsys, tmp_path / "other")
    assert "not valid JSON" in refused(capsys, tmp_path / "broken")
