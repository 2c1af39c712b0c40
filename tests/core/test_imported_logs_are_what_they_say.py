import json
import math
from pathlib import Path

import pytest
import torch

from nerd_core.cli import main
from nerd_core.dataset import TrajectoryDataset, split
from nerd_core.importing import import_trajectories, read_robot
from nerd_core.robot import Body, Joint, RobotSpec
from nerd_core.rotation import canonical, quat_conjugate, quat_multiply, quat_to_rotvec, rotate, rotvec_to_quat

DT = 0.01
SPIN, PRECESSION, TILT = 3.0, 2.0, 0.7
TOSSES = Path(__file__).parents[2].parent / "shared" / "data" / "cube_toss"


def free_body(dt=DT):
    return RobotSpec(
        name="free-body",
        floating=True,
        bodies=(Body(name="body", parent=-1),),
        joints=(),
        control="effort",
        actuated=(),
        ctrl_range=(),
        effort_limit=(),
        timestep=dt,
        substeps=1,
    )


def tumbling(time):
    """A symmetric top in free fall, closed form: world precession about z, a tilt, and a spin about its own axis.

    R = Rz(Ω t) Rx(θ) Rz(ψ̇ t), so ω in the body is Ω R^T ẑ + ψ̇ ẑ; the centre falls from a throw.
    """
    zero = torch.zeros_like(time)

    def turn(angle, axis):
        vector = torch.stack([angle if index == axis else zero for index in range(3)], 1)
        return rotvec_to_quat(vector)

    quat = quat_multiply(quat_multiply(turn(PRECESSION * time, 2), turn(zero + TILT, 0)), turn(SPIN * time, 2))
    spin, precession = torch.tensor([0, 0, SPIN]), torch.tensor([0, 0, PRECESSION])
    body = rotate(quat_conjugate(quat), precession.double().expand(len(time), 3)) + spin
    pos = torch.stack([1.5 * time, -0.5 * time, 1 + 3 * time - 4.905 * time**2], 1)
    vel = torch.stack([1.5 + zero, -0.5 + zero, 3 - 9.81 * time], 1)
    return {"t": time, "p": pos, "q": quat, "v": vel, "w": body}


def names(letter, axes):
    return [letter + axis for axis in axes]


MAPPING = {
    "time": {"column": "t", "unit": "s"},
    "position": {"columns": names("p", "xyz"), "unit": "m"},
    "orientation": {"columns": names("q", "wxyz"), "order": "wxyz"},
    "linear_velocity": {"columns": names("v", "xyz"), "unit": "m/s", "frame": "world"},
    "angular_velocity": {"columns": names("w", "xyz"), "unit": "rad/s", "frame": "body"},
}


def table(motion):
    """Columns by name, as a CSV file has them."""
    columns = {"t": motion["t"]}
    for letter, axes in (("p", "xyz"), ("q", "wxyz"), ("v", "xyz"), ("w", "xyz")):
        columns |= {letter + axis: motion[letter][:, index] for index, axis in enumerate(axes)}
    return columns


def write_csv(path, columns):
    lines = [",".join(columns)]
    lines += [
        ",".join("" if math.isnan(x) else repr(x) for x in row) for row in torch.stack([*columns.values()], 1).tolist()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_mapping(folder, changes=None, without=()):
    document = {k: v for k, v in MAPPING.items() if k not in without}
    for key, change in (changes or {}).items():
        document[key] = document.get(key, {}) | change
    path = folder / "mapping.json"
    path.write_text(json.dumps(document))
    return path


def imported(folder, columns, changes=None, *, horizon=20, without=(), dt=DT, **options):
    log, mapping = write_csv(folder / "log.csv", columns), write_mapping(folder, changes, without)
    return import_trajectories([log], free_body(dt), mapping, folder / "out", horizon=horizon, **options)


def only(report):
    """All states in the order of the log, for a horizon that divides it."""
    (dataset,) = report.datasets.values()
    return dataset.load().states


def instants(count=61, dt=DT):
    return torch.arange(count, dtype=torch.float64) * dt


def closed_form(motion):
    return torch.cat([motion["p"], motion["q"], motion["v"], motion["w"]], 1)


def test_rows_at_the_model_steps_are_taken_as_they_are(tmp_path):
    motion = tumbling(instants())
    states = only(imported(tmp_path, table(motion)))
    assert states.shape == (3, 21, 13)
    truth = closed_form(motion).float()
    for piece, start in zip(states, (0, 20, 40), strict=True):
        torch.testing.assert_close(piece[:, 7:], truth[start : start + 21, 7:], rtol=0, atol=0)
        torch.testing.assert_close(piece[:, :3], truth[start : start + 21, :3], rtol=0, atol=0)
        torch.testing.assert_close(
            canonical(piece[:, 3:7]), canonical(truth[start : start + 21, 3:7]), rtol=0, atol=1e-7
        )


def test_other_units_frames_and_orders_give_the_same_states(tmp_path):
    motion = tumbling(instants())
    plain = table(motion)
    (tmp_path / "plain").mkdir()
    expected = only(imported(tmp_path / "plain", plain))
    v = rotate(quat_conjugate(motion["q"]), motion["v"])
    w = rotate(motion["q"], motion["w"])
    other = table({**motion, "p": 1e3 * motion["p"], "v": 1e3 * v, "w": w / (math.pi / 180), "t": 1e3 * motion["t"]})
    changes = {
        "time": {"unit": "ms"},
        "position": {"unit": "mm"},
        "orientation": {"columns": names("q", "xyzw"), "order": "xyzw"},
        "linear_velocity": {"unit": "mm/s", "frame": "body"},
        "angular_velocity": {"unit": "deg/s", "frame": "world"},
    }
    torch.testing.assert_close(only(imported(tmp_path, other, changes)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("method", "trimmed"), [("backward", (1, 0)), ("central", (1, 1))])
def test_velocities_that_are_not_logged_are_differentiated(tmp_path, method, trimmed):
    motion = tumbling(instants(62 + sum(trimmed) - 1))
    without = ("linear_velocity", "angular_velocity")
    report = imported(tmp_path, table(motion), without=without, velocities=method)
    states = only(report)
    assert report.differentiated == without
    manifest = next(iter(report.datasets.values())).manifest
    assert manifest["engine"]["differentiated"] == dict.fromkeys(without, method)
    first = states[0]
    truth = closed_form(motion)[1:22].float()
    torch.testing.assert_close(first[:, :3], truth[:, :3], rtol=0, atol=1e-6)
    # Backward: late by half a step; of a parabola, central is exact.
    late = 0.5 * DT * 9.81 if method == "backward" else 0.0
    torch.testing.assert_close(first[:, 9], truth[:, 9] + late, rtol=0, atol=1e-5)
    bound = 0.5 * DT * PRECESSION * SPIN if method == "backward" else 0.1 * DT
    assert (first[:, 10:] - truth[:, 10:]).abs().max() < bound


def test_a_log_at_another_rate_is_interpolated_within_the_stated_bound(tmp_path):
    rough = 0.013
    motion = tumbling(instants(60, rough))
    states = only(imported(tmp_path, table(motion), horizon=70))
    truth = tumbling(instants(71))
    assert (states[0, :, :3] - truth["p"]).abs().max() < rough**2 * 9.81 / 8 + 1e-6
    gap = quat_to_rotvec(quat_multiply(quat_conjugate(truth["q"]), states[0, :, 3:7].double())).norm(dim=1)
    # An arc between two orientations misses by no more than h²/8 of the angular acceleration Ω ψ̇ sin θ.
    assert 1e-5 < gap.max() < rough**2 * PRECESSION * SPIN / 8
    assert (states[0, :, 3:7].norm(dim=1) - 1).abs().max() < 1e-6


MIX_UPS = {
    "quaternion order": (
        {"orientation": {"columns": names("q", "xyzw"), "order": "wxyz"}},
        lambda m: m,
        "orientation.order xyzw",
    ),
    "the other quaternion order": (
        {"orientation": {"columns": names("q", "wxyz"), "order": "xyzw"}},
        lambda m: m,
        "orientation.order wxyz",
    ),
    "inverse orientation": ({}, lambda m: m | {"q": quat_conjugate(m["q"])}, "the inverse orientation"),
    "angular frame": ({"angular_velocity": {"frame": "world"}}, lambda m: m, "angular_velocity.frame body"),
    "linear frame": ({"linear_velocity": {"frame": "body"}}, lambda m: m, "linear_velocity.frame world"),
    "degrees": ({"angular_velocity": {"unit": "deg/s"}}, lambda m: m, "rad for deg"),
    "millimetres": ({"position": {"unit": "mm"}}, lambda m: m, "a factor of 1000"),
}


@pytest.mark.parametrize("mix_up", MIX_UPS)
def test_a_mix_up_is_named_with_file_row_and_column(tmp_path, mix_up):
    changes, spoil, words = MIX_UPS[mix_up]
    with pytest.raises(ValueError, match=r"log\.csv: line ") as refusal:
        imported(tmp_path, table(spoil(tumbling(instants()))), changes)
    said = str(refusal.value)
    assert f"with {words}" in said.replace("another unit or sign (", "").replace(
        "another unit or sign of position, velocity or time (", ""
    ), said
    assert "columns " in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.tmp").exists()


def test_velocities_that_fit_no_reading_are_refused_too(tmp_path):
    noise = torch.randn(61, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"stated angular velocity .* no other order, frame or unit agrees either"):
        imported(tmp_path, table(tumbling(instants()) | {"w": 4 * noise}))


def test_gaps_cut_the_trajectory_and_short_pieces_are_counted(tmp_path):
    motion = tumbling(instants(100))
    columns = table(motion)
    columns["qy"][30] = math.nan  # rows 0..29 remain: one piece of 21 frames, one that ends at row 29
    rows = [row for row in range(100) if row not in range(40, 45)]  # rows 31..39: too short; 45..99 remain
    columns = {name: values[rows] for name, values in columns.items()}
    report = imported(tmp_path, columns)
    assert report.gaps == (
        f"{tmp_path / 'log.csv'}: line 32, column qy: no finite number",
        f"{tmp_path / 'log.csv'}: line 42: 0.06 s after the row before",
    )
    assert report.left_out == {"piece between gaps shorter than the horizon": 1}
    starts = only(report)[:, 0, 0] / 1.5 / DT  # x = 1.5 t
    assert starts.round().tolist() == [0, 9, 45, 65, 79]
    assert next(iter(report.datasets.values())).manifest["rejected"] == report.left_out


def test_bad_logs_are_named_and_leave_nothing_behind(tmp_path):
    def spoilt(name, row, value):
        columns = {key: values.clone() for key, values in table(tumbling(instants())).items()}
        columns[name][row] = value
        return columns

    cases = [
        (spoilt("t", 7, 0.05), {}, r"log.csv: line 9, column t: time goes from 0.06 to 0.05"),
        (spoilt("t", 7, math.nan), {}, r"log.csv: line 9, column t: the time is not finite"),
        (spoilt("qw", 3, 9.0), {}, r"log.csv: line 5, columns qw, qx, qy, qz: the quaternion's norm is 9"),
        (table(tumbling(instants(1))), {}, r"log.csv: line 2: a trajectory of 1 rows, expected at least 2"),
        (table(tumbling(instants(15))), {}, r"log.csv: line 2 to line 16, .* has 15 frames .* at least 21"),
        (table(tumbling(instants())), {"time": {"unit": "ms"}}, r"line 2, column time: rows are 1e-05 s apart|unit"),
        (table(tumbling(instants())), {"position": {"unit": "furlong"}}, r"position.unit is 'furlong', expected one"),
        (table(tumbling(instants())), {"position": {"columns": ["px", "py", "alt"]}}, r"no column 'alt', expected"),
    ]
    for index, (columns, changes, words) in enumerate(cases):
        folder = tmp_path / str(index)
        folder.mkdir()
        with pytest.raises(ValueError, match=words):
            imported(folder, columns, changes)
        assert sorted(file.name for file in folder.iterdir()) == ["log.csv", "mapping.json"]


def test_a_cell_that_is_no_number_is_named(tmp_path):
    path = write_csv(tmp_path / "log.csv", table(tumbling(instants())))
    lines = path.read_text().splitlines()
    lines[4] = lines[4].replace(lines[4].split(",")[2], "east", 1)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"log.csv: line 5, column py: 'east' is no number"):
        import_trajectories([path], free_body(), write_mapping(tmp_path), tmp_path / "out", horizon=20)


def test_joints_are_unwrapped_held_and_named(tmp_path):
    robot = RobotSpec(
        name="cart",
        floating=False,
        bodies=(Body(name="cart", parent=-1), Body(name="pole", parent=0)),
        joints=(
            Joint(name="rail", kind="slide", body=0, axis=(1.0, 0.0, 0.0)),
            Joint(name="pole", kind="hinge", body=1, axis=(0.0, 1.0, 0.0)),
        ),
        control="effort",
        actuated=(0,),
        ctrl_range=((-5.0, 5.0),),
        effort_limit=(5.0,),
        timestep=0.01,
        substeps=2,
    )
    (tmp_path / "robot.json").write_text(json.dumps(robot.to_json()))
    time = instants(81)
    angle = torch.remainder(40 * time + 180, 360) - 180 + 0  # [deg], wraps, 40 deg/s
    angle = torch.remainder(angle + 60 * time + 180, 360) - 180  # 100 deg/s together
    force = (time / DT).round()
    write_csv(tmp_path / "log.csv", {"t": time, "x": 100 * time**2, "th": angle, "f": force})
    mapping = {
        "time": {"column": "t", "unit": "s"},
        "joints": {
            "rail": {"position": {"column": "x", "unit": "cm"}},
            "pole": {"position": {"column": "th", "unit": "deg"}},
        },
        "controls": {"rail": {"column": "f", "unit": "N"}},
    }
    (tmp_path / "mapping.json").write_text(json.dumps(mapping))
    flags = ["--robot", str(tmp_path / "robot.json"), "--mapping", str(tmp_path / "mapping.json"), "--horizon", "30"]
    main(["import-trajectories", str(tmp_path / "log.csv"), *flags, "--out", str(tmp_path / "d")])
    data = TrajectoryDataset.open(tmp_path / "d")
    states, controls, _ = data.load()
    assert read_robot(tmp_path / "d") == robot == data.robot
    rate = torch.full((31,), math.radians(100.0))
    torch.testing.assert_close(states[0, :, 3], rate, rtol=0, atol=1e-5)
    assert states[..., 1].abs().max() <= math.pi + 1e-6
    # Backward differences begin at row 1; every second row is a model step, and x = t² moves (2k + 1) h² a row.
    k = 1 + 2 * torch.arange(31)
    torch.testing.assert_close(states[0, :, 0], ((k * DT) ** 2).float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(states[0, :, 2], ((2 * k - 1) * DT).float(), rtol=0, atol=1e-6)
    assert controls[0, :, 0].tolist() == k[:-1].tolist()


def test_pieces_of_a_trajectory_stay_on_one_side_of_every_split(tmp_path):
    motion = tumbling(instants(100))
    columns = {name: values.repeat(10) for name, values in table(motion).items()}
    columns["run"] = torch.arange(10, dtype=torch.float64).repeat_interleave(100)
    changes = {"trajectory": {"column": "run"}}
    report = imported(tmp_path, columns, changes, splits={"train": 7, "test": 3})
    assert report.trajectories == 10
    groups = {name: data.manifest["extra"]["row_groups"] for name, data in report.datasets.items()}
    assert (len(set(groups["train"])), len(set(groups["test"]))) == (7, 3)
    assert not set(groups["train"]) & set(groups["test"])
    data = report.datasets["train"]
    training, held_out = data.split(0.3, 1)
    sides = [{groups["train"][row] for row in side.tolist()} for side in (training, held_out)]
    assert (len(sides[0]), len(sides[1])) == (4, 3)
    assert not sides[0] & sides[1]
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(data.num_trajectories))
    plain = split(data.num_trajectories, 0.3, 1)
    assert len(plain[1]) != len(held_out) or not torch.equal(plain[1], held_out)


@pytest.mark.skipif(not TOSSES.is_dir(), reason="the real cube tosses lie beside the repository, and are not there")
def test_real_cube_tosses_are_read_as_their_description_says(tmp_path):
    mapping = {
        "time": {"interval": 1 / 148, "unit": "s"},
        "trajectory": {"start": "toss_start", "length": "toss_len"},
        "position": {"columns": ["pos"], "unit": "m"},
        "orientation": {"columns": ["quat_wxyz"], "order": "wxyz"},
        "linear_velocity": {"columns": ["lin_vel"], "unit": "m/s", "frame": "world"},
        "angular_velocity": {"columns": ["ang_vel_body"], "unit": "rad/s", "frame": "body"},
    }
    path, file = tmp_path / "mapping.json", TOSSES / "cube_toss_si.npz"
    path.write_text(json.dumps(mapping))
    splits = {"train": 400, "validation": 85, "test": 85}
    report = import_trajectories([file], free_body(1 / 148), path, tmp_path / "d", horizon=79, splits=splits)
    assert (report.trajectories, report.gaps, report.left_out) == (570, (), {})
    found = report.agreements
    assert {name: value.kind for name, value in found.items()} == dict.fromkeys(found, "backward")
    assert all(value.disagreement < 0.05 for value in found.values())
    states = report.datasets["test"].load().states
    heights = states[:, -1, 2]
    assert 0.03 < heights.median() < 0.06  # the cube rests at z = 0.0524 m

    mapping["orientation"]["order"] = "xyzw"
    path.write_text(json.dumps(mapping))
    with pytest.raises(ValueError, match=r"cube_toss_si.npz: row \d+, columns quat_wxyz, .*orientation.order wxyz"):
        import_trajectories([file], free_body(1 / 148), path, tmp_path / "e", horizon=79)
    mapping["orientation"]["order"], mapping["angular_velocity"]["frame"] = "wxyz", "world"
    path.write_text(json.dumps(mapping))
    with pytest.raises(ValueError, match=r"columns quat_wxyz, ang_vel_body: .*angular_velocity.frame body"):
        import_trajectories([file], free_body(1 / 148), path, tmp_path / "e", horizon=79)
    assert not (tmp_path / "e").exists()
