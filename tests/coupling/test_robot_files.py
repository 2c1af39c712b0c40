"""Robots from MJCF and URDF files: read whole, or refused by the name of what cannot be honoured."""

import sys
import types
from importlib import resources

import mujoco
import numpy as np
import pytest

from nerd_contact import Kinematics
from nerd_coupling.robots import build_model, load_robot
from nerd_coupling.terrain import Terrain

LINK = '<inertial pos="0 0 0.1" mass="2" diaginertia="0.02 0.02 0.01"/>'
ARM = f"""
<mujoco model="arm">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="0.004"/>
  <worldbody>
    <body name="upper">{LINK}
      <joint name="shoulder" axis="0 1 0" range="-1 1"/>
      <geom name="rod" type="capsule" fromto="0 0 0 0 0 0.3" size="0.03"/>
      <body name="lower" pos="0 0 0.3">{LINK}
        <joint name="elbow" axis="0 1 0" range="-2 2"/>
        <geom name="block" type="box" pos="0 0 0.1" size="0.02 0.03 0.1"/>
        <!--more-->
      </body>
    </body>
  </worldbody>
  <actuator>
    <position name="shoulder" joint="shoulder" kp="30" kv="2" forcerange="-10 10" ctrlrange="-1 1"/>
    <position name="elbow" joint="elbow" kp="20" kv="1" forcerange="-10 10" ctrlrange="-2 2"/>
  </actuator>
</mujoco>
"""

INERTIAL = """<inertial><origin xyz="0 0 0.1"/><mass value="{mass}"/>
  <inertia ixx="{ixx}" iyy="0.02" izz="0.01" ixy="0" ixz="0" iyz="0"/></inertial>"""


def urdf(*, mass=2.0, ixx=0.02, joint="", kind="revolute", limit='<limit lower="-1" upper="1" effort="20"/>', arm=None):
    inertial = INERTIAL.format(mass=mass, ixx=ixx) if arm is None else arm
    return f"""<?xml version="1.0"?>
<robot name="r">
  <link name="base">{INERTIAL.format(mass=5, ixx=0.02)}
    <collision><geometry><sphere radius="0.1"/></geometry></collision></link>
  <link name="arm">{inertial}
    <collision><origin xyz="0 0 0.2"/><geometry><cylinder radius="0.02" length="0.4"/></geometry></collision></link>
  <link name="tip">{INERTIAL.format(mass=0.1, ixx=0.02)}</link>
  <joint name="turn" type="{kind}"><parent link="base"/><child link="arm"/><origin xyz="0 0 0.1"/>
    <axis xyz="0 1 0"/>{limit}<dynamics damping="0.3"/>{joint}</joint>
  <joint name="weld" type="fixed"><parent link="arm"/><child link="tip"/><origin xyz="0 0 0.4"/></joint>
</robot>"""


def written(tmp_path, text, name="robot.xml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_shipped_file_by_path_is_the_robot_by_name():
    with resources.as_file(resources.files("nerd_coupling") / "assets" / "go2.xml") as path:
        robot, go2 = load_robot(path), load_robot("go2")
        assert load_robot(str(path)).spec == go2.spec
    assert robot.spec == go2.spec
    assert robot.probes == go2.probes
    assert (robot.home_qpos, robot.home_ctrl, robot.mjcf) == (go2.home_qpos, go2.home_ctrl, go2.mjcf)


def test_an_mjcf_file_is_read_as_it_stands(tmp_path):
    robot = load_robot(written(tmp_path, ARM, "arm.xml"))
    spec = robot.spec
    assert (spec.name, spec.nq, spec.nu, spec.control, spec.floating) == ("arm", 2, 2, "position", False)
    assert (spec.kp, spec.kd, spec.effort_limit) == ((30.0, 20.0), (2.0, 1.0), (10.0, 10.0))
    assert (spec.timestep, spec.substeps) == (0.004, 5)  # nearest to 20 ms
    assert load_robot(tmp_path / "arm.xml", substeps=2).spec.dt == pytest.approx(0.008)
    assert robot.mjcf == ARM
    assert robot.home_qpos == (0.0, 0.0)
    corners = [p for p in robot.probes if p.name.startswith("block")]
    assert len(corners) == 8
    assert all(p.radius == 0.0 for p in corners)
    Kinematics(spec)


def test_the_joints_own_effort_range_counts_if_it_is_the_tighter_one(tmp_path):
    text = ARM.replace('range="-2 2"/>\n        <geom', 'range="-2 2" actuatorfrcrange="-4 4"/>\n        <geom')
    assert load_robot(written(tmp_path, text)).spec.effort_limit == (10.0, 4.0)
    only = text.replace('kp="20" kv="1" forcerange="-10 10"', 'kp="20" kv="1"')
    robot = load_robot(written(tmp_path, only))
    assert robot.spec.effort_limit == (10.0, 4.0)
    mj_model = build_model(robot, Terrain())
    data = mujoco.MjData(mj_model)
    data.ctrl[:] = 2.0
    mujoco.mj_forward(mj_model, data)
    assert data.qfrc_actuator[1] == pytest.approx(4.0)


def test_a_urdf_gets_a_motor_for_each_joint_within_its_effort_limit(tmp_path):
    robot = load_robot(written(tmp_path, urdf(), "r.urdf"))
    spec = robot.spec
    assert (spec.name, spec.control, spec.nu, spec.floating) == ("r", "effort", 1, False)
    assert (spec.effort_limit, spec.ctrl_range) == ((20.0,), ((-20.0, 20.0),))
    assert (spec.joints[0].name, spec.joints[0].range) == ("turn", (-1.0, 1.0))
    mj_model = mujoco.MjModel.from_xml_string(robot.mjcf)
    assert [body.name for body in spec.bodies] == ["base", "arm", "tip"]
    assert mj_model.body("arm").subtreemass == pytest.approx(2.1)  # with the tip welded on
    assert mj_model.dof_damping[0] == pytest.approx(0.3)
    # Eight points on each rim of the cylinder.
    rims = np.array([p.pos for p in robot.probes if p.body == 1])
    np.testing.assert_allclose(np.abs(rims[:, 2] - 0.2), 0.2)
    assert len(rims) == 16
    np.testing.assert_allclose(np.hypot(*rims[:, :2].T), 0.02)


def test_a_urdf_is_set_free_on_request(tmp_path):
    robot = load_robot(written(tmp_path, urdf(), "r.urdf"), floating=True)
    assert (robot.spec.floating, robot.spec.nq) == (True, 8)
    assert mujoco.MjModel.from_xml_string(robot.mjcf).body_mass.sum() == pytest.approx(7.1)
    mj_model = build_model(robot, Terrain())
    data = mujoco.MjData(mj_model)
    data.qpos[:] = robot.home_qpos
    data.qpos[2] = 0.3
    mujoco.mj_step(mj_model, data, nstep=500)
    assert len(data.contact.dist) > 0  # it lies on the ground
    with pytest.raises(ValueError, match=r"body 'upper' has joint 'shoulder': expected none on a root"):
        load_robot(written(tmp_path, ARM), floating=True)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('<equality><joint name="tie" joint1="elbow" joint2="shoulder"/></equality>', r"constraint 'tie' \(joint\)"),
        ('<equality><weld body1="lower" body2="upper"/></equality>', r"constraint number 0 \(unnamed\) \(weld\)"),
        ('<tendon><fixed name="cord"><joint joint="elbow" coef="1"/></fixed></tendon>', "tendon 'cord'"),
        (
            '<worldbody><body name="ball"><joint name="b" type="ball"/><geom size="1"/></body></worldbody>',
            "joint 'b' is",
        ),
        ('<worldbody><body name="toy"><freejoint name="f"/><geom size="1"/></body></worldbody>', "joint 'f' is"),
        (
            '<worldbody><body name="goal" mocap="true"><geom size="1"/></body></worldbody>',
            "body 'goal' is a mocap body",
        ),
        ('<worldbody><geom name="wall" size="1"/></worldbody>', "geom 'wall' of the world collides"),
        (
            '<worldbody><geom type="plane" size="1 1 1"/></worldbody>',
            r"geom number 0 \(unnamed\) of the world collides",
        ),
        ('<actuator><motor name="m" joint="elbow" ctrlrange="-1 1"/></actuator>', "shares joint 'elbow'"),
    ],
)
def test_what_a_robot_cannot_express_is_refused_by_name(tmp_path, extra, message):
    path = written(tmp_path, ARM.replace("</mujoco>", extra + "</mujoco>"))
    with pytest.raises(ValueError, match=message):
        load_robot(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('<joint name="elbow"', '<joint name="twist" axis="0 0 1"/><joint name="elbow"', "body 'lower' has 2 joints"),
        ('name="elbow" axis', 'name="elbow" ref="0.5" axis', "joint 'elbow' has ref 0.5"),
        ('kp="20" kv="1" forcerange="-10 10"', 'kp="20" kv="1"', "actuator 'elbow' must have gear 1 and a force range"),
        ('kp="20" kv="1"', 'kp="20" kv="1" gear="2"', "actuator 'elbow' must have gear 1"),
        ('kp="20" kv="1"', 'kp="20" timeconst="0.1"', "actuator 'elbow' has a state of its own"),
        (
            '<position name="elbow" joint="elbow" kp="20" kv="1"',
            '<motor name="elbow" joint="elbow"',
            "actuator 'elbow'",
        ),
        ("<!--more-->", '<geom name="egg" type="ellipsoid" size="0.1 0.1 0.2"/>', "geom 'egg' is a mjGEOM_ELLIPSOID"),
    ],
)
def test_a_link_joint_actuator_or_shape_that_does_not_fit_is_refused_by_name(tmp_path, old, new, message):
    assert ARM.count(old) == 1
    with pytest.raises(ValueError, match=message):
        load_robot(written(tmp_path, ARM.replace(old, new)))


@pytest.mark.parametrize(
    ("inertial", "message"),
    [
        ('mass="-2" diaginertia="0.02 0.02 0.01"', r"body 'lower': mass is -2 kg, expected a positive mass"),
        ('mass="2" diaginertia="0.02 0.02 0.05"', r"body 'lower': .* 0.02, 0.02, 0.05 kg m².*triangle inequality"),
        ('mass="2" diaginertia="0.02 0.02 -0.01"', r"body 'lower': principal moments .* -0.01, .*expected positive"),
        ('mass="2" fullinertia="1 1 0 0 0 0"', r"body 'lower': principal moments of inertia are 0, 1, 1"),
        ('mass="2" fullinertia="1 1 1 2 0 0"', r"body 'lower': principal moments of inertia are -1, 1, 3"),
        ('mass="nan" diaginertia="1 1 1"', r"robot.xml: .*nan"),
    ],
)
@pytest.mark.parametrize("repair", ["", 'balanceinertia="true"'])
def test_an_impossible_inertia_is_refused_by_the_links_name_and_never_repaired(tmp_path, inertial, message, repair):
    text = ARM.replace('autolimits="true"', f'autolimits="true" {repair}')
    head, _, tail = text.rpartition(LINK)
    with pytest.raises(ValueError, match=message):
        load_robot(written(tmp_path, f'{head}<inertial pos="0 0 0" {inertial}/>{tail}'))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"joint": '<mimic joint="other" multiplier="2"/>'}, "joint 'turn' mimics joint 'other'"),
        ({"kind": "planar"}, "joint 'turn' is of type 'planar': expected one of revolute"),
        ({"kind": "floating"}, "joint 'turn' is of type 'floating'"),
        ({"kind": "hinge"}, "joint 'turn' is of type 'hinge'"),
        ({"limit": ""}, "joint 'turn' has no effort limit"),
        ({"limit": '<limit lower="-1" upper="1" effort="0"/>'}, "joint 'turn' has no effort limit"),
        ({"limit": '<limit lower="-1" upper="1" effort="much"/>'}, "joint 'turn' has no effort limit"),
        ({"mass": -1.0}, "body 'arm': mass is -1 kg"),
        ({"ixx": 0.9}, "body 'arm': .*triangle inequality"),
        ({"ixx": 0.0}, "body 'arm': .*expected positive ones"),
        ({"arm": ""}, "link 'arm' has no <inertial>: its mass would be made up"),
    ],
)
def test_a_urdf_that_cannot_be_honoured_is_refused_by_name(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        load_robot(written(tmp_path, urdf(**settings), "r.urdf"))


def test_a_robot_without_contact_shapes_is_refused_unless_it_is_meant(tmp_path):
    bare = ARM.replace('name="rod"', 'name="rod" contype="0" conaffinity="0"')
    bare = bare.replace('name="block"', 'name="block" contype="2" conaffinity="2"')
    path = written(tmp_path, bare)
    with pytest.raises(ValueError, match="robot 'upper' has no shape that meets the ground"):
        load_robot(path)
    assert load_robot(path, touches_nothing=True).spec.nq == 2


TETRAHEDRON = "0 0 0  0.2 0 0  0 0.2 0  0 0 0.4"


def meshed(geom, inertial=LINK):
    text = ARM.replace("<worldbody>", f'<asset><mesh name="hull" vertex="{TETRAHEDRON}"/></asset><worldbody>')
    head, _, tail = text.replace("<!--more-->", geom).rpartition(LINK)
    return head + inertial + tail


def test_meshes_that_are_only_looked_at_are_left_out_and_the_mass_stays(tmp_path):
    look = '<geom name="skin" type="mesh" mesh="hull" contype="0" conaffinity="0"/>'
    robot = load_robot(written(tmp_path, meshed(look)))
    mj_model = mujoco.MjModel.from_xml_string(robot.mjcf)
    assert mj_model.body_mass.sum() == pytest.approx(4.0)
    assert len(robot.probes) == len(load_robot(written(tmp_path, ARM)).probes)


def test_meshes_in_files_that_are_not_there_need_not_be_there(tmp_path):
    text = ARM.replace("<worldbody>", '<asset><mesh name="hull" file="gone.stl"/></asset><worldbody>')
    look = '<geom name="skin" type="mesh" mesh="hull" contype="0" conaffinity="0"/>'
    robot = load_robot(written(tmp_path, text.replace("<!--more-->", look)))
    assert "gone" not in robot.mjcf
    assert robot.spec == load_robot(written(tmp_path, ARM)).spec


def test_meshes_that_collide_are_refused_or_become_the_capsules_that_fit(tmp_path):
    path = written(tmp_path, meshed('<geom name="shell" type="mesh" mesh="hull"/>'))
    with pytest.raises(ValueError, match="geom 'shell' collides as the mesh 'hull'"):
        load_robot(path)
    robot = load_robot(path, fit_meshes=True)
    mj_model = mujoco.MjModel.from_xml_string(robot.mjcf)
    assert mj_model.geom("shell").type == mujoco.mjtGeom.mjGEOM_CAPSULE
    assert mj_model.body_mass.sum() == pytest.approx(4.0)
    # It lies where the mesh lies: about the tetrahedron's centre of mass, along its longest side.
    radius, half = mj_model.geom("shell").size[:2]
    np.testing.assert_allclose(mj_model.geom("shell").pos, [0.05, 0.05, 0.1], atol=0.03)
    assert 0.05 < radius < 0.2
    assert half + radius == pytest.approx(0.2, abs=0.06)


def test_a_mesh_that_carries_its_links_mass_is_refused(tmp_path):
    path = written(tmp_path, meshed('<geom name="shell" type="mesh" mesh="hull"/>', inertial=""))
    with pytest.raises(ValueError, match="geom 'shell': the mesh 'hull' gives body 'lower' its mass"):
        load_robot(path, fit_meshes=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as XML"),
        ("<mujoco><worldbody>", "not readable as XML"),
        ("<html/>", "the root element is <html>, expected <mujoco> or <robot>"),
        ("<mujoco><nonsense/></mujoco>", "nonsense"),
        ("<mujoco/>", "has no shape that meets the ground"),
        (ARM.replace('joint="elbow"', 'joint="knee"'), "knee"),
        (ARM.replace('size="0.03"', 'size="-0.03"'), "size"),
        ("<robot name='r'/>", "."),
        (urdf().replace('<child link="arm"/>', '<child link="leg"/>'), "joint 'turn' has child link 'leg'"),
    ],
)
def test_a_malformed_file_is_a_value_error_that_names_it(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"robot\.xml: (.|\n)*{message}"):
        load_robot(written(tmp_path, text))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.urdf: no such file"):
        load_robot(tmp_path / "gone.urdf")
    (tmp_path / "bytes.xml").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"bytes\.xml: not readable as XML"):
        load_robot(tmp_path / "bytes.xml")


def test_options_for_files_are_refused_with_a_name(tmp_path):
    with pytest.raises(ValueError, match="floating is True, but robot 'go2' is not from a file"):
        load_robot("go2", floating=True)
    with pytest.raises(ValueError, match="substeps is 0, expected at least 1"):
        load_robot(written(tmp_path, ARM), substeps=0)


def test_menagerie_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_menagerie", None)
    with pytest.raises(ValueError, match=r"mujoco-menagerie is not installed; install nerd-coupling\[menagerie\]"):
        load_robot("menagerie:unitree_go2")


def test_a_menagerie_robot_is_loaded_by_name_and_file(monkeypatch, tmp_path):
    """The package's face, as of its release 2026.10.4, without its downloads."""
    written(tmp_path, ARM, "arm.xml")
    written(tmp_path, ARM.replace('kp="30"', 'kp="60"'), "arm_mjx.xml")

    class MenagerieError(Exception):
        pass

    class Entry:
        default_model = "arm"

        def xml(self, entry):
            if entry not in ("arm", "arm_mjx"):
                raise MenagerieError(f"no entry point {entry!r}")
            return tmp_path / f"{entry}.xml"

    package = types.ModuleType("mujoco_menagerie")
    package.names, package.get, package.MenagerieError = lambda: ["some_arm"], lambda name: Entry(), MenagerieError
    monkeypatch.setitem(sys.modules, "mujoco_menagerie", package)
    assert load_robot("menagerie:some_arm").spec.kp == (30.0, 20.0)
    robot = load_robot("menagerie:some_arm/arm_mjx")
    assert (robot.name, robot.spec.kp) == ("some_arm/arm_mjx", (60.0, 20.0))
    with pytest.raises(ValueError, match="no robot 'some_harm' in MuJoCo Menagerie; did you mean some_arm"):
        load_robot("menagerie:some_harm")
    with pytest.raises(ValueError, match="no entry point 'leg'"):
        load_robot("menagerie:some_arm/leg")
