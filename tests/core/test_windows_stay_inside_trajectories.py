import pytest
import torch

from nerd_core.dataset import Trajectories
from nerd_core.windows import TrajectoryPool, WindowSampler, seeded_generator


def numbered(rows, steps, first):
    """State entries say (trajectory, frame); control entries too."""
    row = torch.arange(first, first + rows).view(-1, 1, 1)
    frames = torch.arange(steps + 1).view(1, -1, 1).expand(rows, -1, 1)
    states = torch.cat([row.expand(rows, steps + 1, 1), frames], -1).float()
    return Trajectories(states, states[:, :-1].clone(), {"row": row.flatten()})


def pool():
    return TrajectoryPool([numbered(3, 10, 0), numbered(2, 6, 3)], torch.device("cpu"))


def test_every_window_holds_consecutive_frames_of_one_trajectory():
    data = pool()
    sampler = WindowSampler(data, torch.arange(5), 4)
    rows, offsets = sampler.draw(2000, seeded_generator(0))
    states, controls = data.windows(rows, offsets, 4)
    expected = offsets[:, None] + torch.arange(5)
    assert torch.equal(states[..., 0], rows[:, None].expand(-1, 5).float())
    assert torch.equal(states[..., 1], expected.float())
    assert torch.equal(controls, states[:, :-1])
    assert torch.equal(data.scene(rows)["row"], rows)


def test_every_window_of_the_chosen_trajectories_is_drawn_and_equally_often():
    data = pool()
    rows, offsets = WindowSampler(data, torch.tensor([1, 4]), 4).draw(10_000, seeded_generator(1))
    seen, counts = torch.stack([rows, offsets], 1).unique(dim=0, return_counts=True)
    expected = [[1, start] for start in range(7)] + [[4, start] for start in range(3)]
    assert seen.tolist() == expected
    assert counts.min() > 850  # 1000 each, standard deviation 30
    assert counts.max() < 1150


def test_a_window_longer_than_a_trajectory_is_refused():
    with pytest.raises(ValueError, match="window: got 7 steps, but trajectories have 6"):
        WindowSampler(pool(), torch.tensor([0, 3]), 7)


def test_random_numbers_depend_on_every_part_of_their_name():
    def first(seed, *names):
        return int(torch.randint(2**40, (), generator=seeded_generator(seed, *names)))

    # torch's generator reads 32 bits of its seed, so plain arithmetic on seeds would collide.
    draws = {first(0, "a", 1), first(0, "a", 2), first(2**32, "a", 1), first(0, "b", 1), first(0)}
    assert len(draws) == 5
    assert first(0, "a", 1) == first(0, "a", 1)


def test_datasets_with_different_scenes_do_not_mix():
    other = numbered(2, 6, 3)._replace(scenes={})
    with pytest.raises(ValueError, match="scene"):
        TrajectoryPool([numbered(3, 10, 0), other], torch.device("cpu"))
