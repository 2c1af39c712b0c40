import torch

from nerd_core.cartpole import CartPole
from nerd_core.losses import channel_weights, teacher_loss
from nerd_core.model import FlashNerd, FlashNerdConfig
from nerd_core.robot import Body, Joint, RobotSpec

SIZES = FlashNerdConfig(width=4, heads=1, spans=(1,), hidden=4, readout_hidden=4)


def test_a_position_weighs_what_a_velocity_error_of_one_step_does_to_it():
    model = FlashNerd(SIZES, CartPole().robot())  # dt = 1/60
    model.target_stats.std.copy_(torch.tensor([0.01, 1.0, 6.0, 6.0]))
    # 0.01 m against 6 m/s * 1/60 s = 0.1 m: (1/10)². 1 rad against 0.1 rad: capped at one.
    torch.testing.assert_close(channel_weights(model), torch.tensor([0.01, 1.0, 1.0, 1.0]))
    model.target_stats.active.copy_(torch.tensor([1.0, 0.0, 1.0, 1.0]))
    torch.testing.assert_close(channel_weights(model), torch.tensor([0.01, 0.0, 1.0, 1.0]))


def test_a_floating_base_pairs_pose_with_twist_and_joints_with_their_rates():
    robot = RobotSpec(
        name="box",
        floating=True,
        bodies=(Body(name="base", parent=-1), Body(name="arm", parent=0)),
        joints=(Joint(name="elbow", kind="hinge", body=1, axis=(0.0, 1.0, 0.0), range=(-1, 1)),),
        control="effort",
        actuated=(0,),
        ctrl_range=((-1.0, 1.0),),
        effort_limit=(1.0,),
        timestep=0.1,
        substeps=1,
    )
    model = FlashNerd(SIZES, robot)
    names = model.codec.delta_names
    std = dict.fromkeys(names, 1.0)
    std["translation_y"], std["linvel_change_y"] = 0.02, 2.0  # against 0.2: (1/10)²
    std["rotation_z"], std["angvel_change_z"] = 0.1, 2.0  # against 0.2: (1/2)²
    std["elbow_change"], std["elbow_vel_change"] = 0.1, 4.0  # against 0.4: (1/4)²
    model.target_stats.std.copy_(torch.tensor([std[name] for name in names]))
    weights = dict(zip(names, channel_weights(model).tolist(), strict=True))
    expected = dict.fromkeys(names, 1.0)
    expected |= {"translation_y": 0.01, "rotation_z": 0.25, "elbow_change": 0.0625}
    assert {name: round(weight, 6) for name, weight in weights.items()} == expected


def test_the_loss_of_predicting_the_mean_is_one():
    model = FlashNerd(SIZES, CartPole().robot())
    states, controls = CartPole().record(256, 20, torch.Generator().manual_seed(0))
    states, controls = states.float(), controls.float()
    now, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    model.fit(now, controls.flatten(0, 1), after)
    torch.nn.init.zeros_(model.affine.weight)
    torch.nn.init.zeros_(model.affine.bias)
    with torch.no_grad():
        loss = teacher_loss(model, states, controls, None)
    torch.testing.assert_close(loss, torch.tensor(1.0), atol=1e-3, rtol=0)
