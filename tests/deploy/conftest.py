"""Two small models and their exported files."""

import shutil
from pathlib import Path

import pytest
import torch

import nerd_mpc
from nerd_contact import ContactEncoderConfig, ContactSetEncoder
from nerd_core import FlashNerd, FlashNerdConfig
from nerd_core.artifact import save_model
from nerd_core.cartpole import CartPole
from nerd_coupling.robots import build_model, load_robot, probes
from nerd_coupling.terrain import Terrain
from nerd_deploy import export_artifact


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


def exported(folder, name, model):
    """Model folder and artifact; beside it, the artifact's ONNX file alone."""
    save_model(folder / "model", model)
    export_artifact(folder / "model", folder / f"{name}.nerd")
    shutil.copy(folder / f"{name}.nerd" / "model.onnx", folder / f"{name}.onnx")
    return folder / "model", folder / f"{name}.nerd"


@pytest.fixture(scope="session")
def cartpole_nerd(tmp_path_factory):
    """Folder of a model without surroundings, and its artifact."""
    return exported(tmp_path_factory.mktemp("cartpole"), "cartpole", small_cartpole())


@pytest.fixture(scope="session")
def walker_nerd(tmp_path_factory):
    """Folder of a model that sees contacts, and its artifact."""
    return exported(tmp_path_factory.mktemp("walker"), "walker", small_walker())


@pytest.fixture(scope="session")
def cartpole(cartpole_nerd):
    """Folder of a model without surroundings, and its exported file."""
    return cartpole_nerd[0], cartpole_nerd[1].with_suffix(".onnx")


@pytest.fixture(scope="session")
def walker(walker_nerd):
    """Folder of a model that sees contacts, and its exported file."""
    return walker_nerd[0], walker_nerd[1].with_suffix(".onnx")


@pytest.fixture(scope="session")
def released():
    """Folder of the model that nerd-mpc carries."""
    folder = Path(nerd_mpc.__file__).parent / "models" / "go2-climb"
    if not folder.is_dir():
        pytest.skip("nerd-mpc carries no model here")
    return folder


@pytest.fixture(scope="session")
def released_nerd(released, tmp_path_factory):
    """The artifact of the released model."""
    path = tmp_path_factory.mktemp("released") / "go2-climb.nerd"
    export_artifact(released, path)
    return path


@pytest.fixture
def copied(cartpole_nerd, tmp_path):
    """A copy of an artifact that a test may spoil."""
    return Path(shutil.copytree(cartpole_nerd[1], tmp_path / "copied.nerd"))


@pytest.fixture
def forgetful():
    """A model whose only block looks at the present alone."""
    return small_cartpole(spans=(1,))
