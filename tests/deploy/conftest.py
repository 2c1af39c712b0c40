"""Two small models and their exported files."""

import pytest
import torch

from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerd, FlashNerdConfig
from nerd_core.artifact import save_model
from nerd_core.cartpole import CartPole
from nerd_coupling.robots import build_model, load_robot, probes
from nerd_coupling.terrain import Terrain
from nerd_deploy import export_onnx


def small_cartpole(spans=(3, 1, 2), seed=0):
    """Best affine model of the teacher, and a small random part that looks at the past."""
    draw = torch.Generator().manual_seed(seed)
    states, controls = (x.float() for x in CartPole().record(200, 10, draw))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"width": 16, "heads": 2, "hidden": 16, "readout_hidden": 16}
        model = FlashNerd(FlashNerdConfig(spans=spans, **sizes), CartPole().robot())
        before, after = (x.reshape(-1, 4) for x in (states[:, :-1], states[:, 1:]))
        model.fit(before, controls.reshape(-1, 1), after)
        torch.nn.init.normal_(model.readout_out.weight, std=0.02)
    return model.eval()


def small_walker():
    """A Go2 whose velocities die out, pushed about by what it touches and what it remembers."""
    robot = load_robot("go2")
    found, _ = probes(build_model(robot, Terrain()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = ContactEncoderConfig(num_slots=2, slot_width=4, hidden=16, max_rows=8)
        encoder = ContactSetEncoder(config, robot.spec, tuple(found))
        sizes = {"width": 16, "heads": 2, "hidden": 16, "readout_hidden": 16}
        model = FlashNerd(FlashNerdConfig(spans=(3, 2), **sizes), robot.spec, encoder)
        torch.nn.init.normal_(model.readout_out.weight, std=0.02)
    names = model.codec.token_names
    pairs = [("linvel_change_z", "linvel_base_z"), ("angvel_change_x", "angvel_base_x")]
    pairs += [(f"{joint.name}_vel_change", f"{joint.name}_vel") for joint in robot.spec.joints]
    with torch.no_grad():
        for change, rate in pairs:
            row = model.codec.delta_names.index(change)
            model.affine.weight[row, names.index(rate)] = -0.3
    return model.eval()


@pytest.fixture(scope="session")
def cartpole(tmp_path_factory):
    """Folder of a model without surroundings, and its exported file."""
    path = tmp_path_factory.mktemp("cartpole")
    save_model(path / "model", small_cartpole())
    export_onnx(path / "model", path / "cartpole.onnx")
    return path / "model", path / "cartpole.onnx"


@pytest.fixture(scope="session")
def walker(tmp_path_factory):
    """Folder of a model that sees contacts, and its exported file."""
    path = tmp_path_factory.mktemp("walker")
    save_model(path / "model", small_walker())
    export_onnx(path / "model", path / "walker.onnx")
    return path / "model", path / "walker.onnx"


@pytest.fixture
def forgetful():
    """A model whose only block looks at the present alone."""
    return small_cartpole(spans=(1,))
