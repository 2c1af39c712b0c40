import subprocess
import sys

SCRIPT = """
import sys
sys.modules["numpy"] = None  # any import of numpy now fails
from nerd_core.cli import main
main(["collect-cartpole", "--out", "data", "--trajectories", "20", "--horizon", "10"])
main("train data --out run --steps 2 --window 7 --width 8 --heads 2 --hidden 8".split())
main(["eval", "run", "data"])
"""


def test_recording_training_and_evaluating_work_where_numpy_is_not_installed(tmp_path):
    finished = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith('{"command": "eval"')
