"""What the set encoder promises: order, padding, emptiness, duplicates, overflow."""

import pytest
import torch

from nerd_contact import (
    ContactEncoderConfig,
    ContactSet,
    ContactSetEncoder,
    FixedContactConfig,
    FixedContactFeatures,
    PrimitiveCollider,
)
from nerd_contact.encoder import from_config
from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain, scene


def encoder(pooling="gated"):
    robot = load_robot("go2")
    torch.manual_seed(0)
    config = ContactEncoderConfig(pooling=pooling)
    return ContactSetEncoder(config, robot.spec, robot.probes).double()


def rows(batch=5, count=8, seed=0, masked=3):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.ones(batch, count, dtype=torch.bool)
    mask[:, count - masked :] = False
    direction = normal(batch, count, 3)
    return ContactSet(
        point=normal(batch, count, 3) * 0.2,
        normal=direction / direction.norm(dim=-1, keepdim=True),
        gap=0.05 * torch.rand(batch, count, generator=g, dtype=torch.float64) - 0.005,
        velocity=normal(batch, count, 3),
        friction=torch.full((batch, count), 0.8, dtype=torch.float64),
        link=torch.randint(13, (batch, count), generator=g),
        kind=torch.zeros(batch, count, dtype=torch.int64),
        mask=mask,
        count=mask.sum(-1),
    )


@pytest.mark.parametrize("pooling", ["gated", "softmax"])
@torch.no_grad()
def test_the_order_of_rows_does_not_matter(pooling):
    enc, given = encoder(pooling), rows()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    moved = ContactSet(*(v[:, order] for v in given[:-1]), given.count)
    torch.testing.assert_close(enc(moved._asdict()), enc(given._asdict()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pooling", ["gated", "softmax"])
@torch.no_grad()
def test_padding_does_not_matter_whatever_stands_in_it(pooling):
    enc, given = encoder(pooling), rows(masked=0)
    pad = rows(count=56, seed=9)
    wild = [torch.full_like(v, torch.nan) if v.is_floating_point() else v for v in pad[:-2]]
    grown = [torch.cat([a, b], 1) for a, b in zip(given[:-2], wild, strict=True)]
    mask = torch.cat([given.mask, torch.zeros_like(pad.mask)], 1)
    padded = ContactSet(*grown, mask, given.count)
    torch.testing.assert_close(enc(padded._asdict()), enc(given._asdict()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pooling", ["gated", "softmax"])
@torch.no_grad()
def test_the_empty_set_is_finite_and_constant(pooling):
    enc = encoder(pooling)
    empty = [rows(seed=s)._replace(mask=torch.zeros(5, 8, dtype=torch.bool)) for s in (0, 1)]
    first, second = (enc(r._asdict()) for r in empty)
    assert bool(torch.isfinite(first).all())
    assert torch.equal(first, second)
    assert torch.equal(first[0], first[4])


@torch.no_grad()
def test_a_duplicated_row_changes_the_count_and_the_gated_sums():
    enc, given = encoder(), rows(masked=0)
    twice = ContactSet(*(torch.cat([v, v], 1) for v in given[:-1]), 2 * given.count)
    one, two = enc(given._asdict()), enc(twice._asdict())
    torch.testing.assert_close(two[:, :-1], 2 * one[:, :-1])
    torch.testing.assert_close(two[:, -1], torch.log(torch.tensor(17.0)).double().expand(5))


@torch.no_grad()
def test_gradients_are_finite_behind_a_nan_in_the_padding():
    given = rows()
    gap = given.gap.clone()
    gap[:, -1] = torch.nan
    with torch.enable_grad():
        point = given.point.clone().requires_grad_(True)
        out = encoder()(given._replace(gap=gap, point=point)._asdict())
        (gradient,) = torch.autograd.grad(out.sum(), point)
    assert bool(torch.isfinite(gradient).all())


def test_no_gradient_of_anything_is_lost_to_nan_in_the_padding():
    given = rows()
    hole = ~given.mask
    wild = {
        k: torch.where(hole.view(*hole.shape, *[1] * (v.dim() - 2)), torch.nan, v)
        for k, v in given._asdict().items()
        if v.is_floating_point()
    }
    robot = load_robot("go2")
    fixed = FixedContactFeatures(FixedContactConfig(), robot.spec, robot.probes[:8])
    for features in (encoder(), encoder("softmax"), fixed):
        leaves = {k: v.clone().requires_grad_(True) for k, v in wild.items()}
        out = features(given._replace(**leaves)._asdict())
        assert bool(torch.isfinite(out).all())
        used = [v for k, v in leaves.items() if k != "friction" or features is not fixed]
        for gradient in torch.autograd.grad(out.square().sum(), used):
            assert bool(torch.isfinite(gradient).all())
            assert bool((gradient[:, hole[0]] == 0).all())
            assert bool((gradient[:, ~hole[0]] != 0).any())


def test_overflow_is_a_value_of_each_world_and_survives_a_second_cut():
    given = rows(batch=3, masked=0)
    given = given._replace(mask=torch.arange(8) < torch.tensor([[8], [3], [0]]))
    given = given._replace(count=given.mask.sum(-1))
    once = given.deepest(4)
    assert once.overflow.tolist() == [4, 0, 0]
    assert once.deepest(2).overflow.tolist() == [6, 1, 0]
    assert once.mask.sum(-1).tolist() == [4, 3, 0]
    # Rows that do not exist are never kept in place of one that does, however deep the number that stands there.
    wild = given._replace(gap=torch.where(given.mask, given.gap, -9.0))
    assert torch.equal(wild.deepest(4).mask, once.mask)
    assert torch.equal(torch.where(once.mask, wild.deepest(4).gap, 0.0), torch.where(once.mask, once.gap, 0.0))


def test_duplicates_are_kept_or_dropped_one_by_one():
    given = rows(batch=2, masked=0)
    twice = ContactSet(*(torch.cat([v, v], 1) for v in given[:-1]), 2 * given.count)
    kept = twice.deepest(6)
    deepest_three = given.gap.sort(-1).values[:, :3]
    torch.testing.assert_close(kept.gap.sort(-1).values, deepest_three.repeat_interleave(2, -1))
    assert kept.overflow.tolist() == [10, 10]


def test_a_collider_reports_the_rows_it_had_no_room_for():
    robot = load_robot("go2")
    state = torch.tensor(robot.home_state).repeat(2, 1)
    state[1, 2] += 5.0  # out of reach of everything
    where = {k: v.expand(2, *v.shape[1:]) for k, v in scene(Terrain()).items()}
    all_rows = PrimitiveCollider(robot.spec, robot.probes)(state, where)
    few = PrimitiveCollider(robot.spec, robot.probes, max_rows=3)(state, where)
    there = int(all_rows.mask[0].sum())
    assert there > 3
    assert few.count.tolist() == [there, 0]
    assert few.overflow.tolist() == [there - 3, 0]
    torch.testing.assert_close(few.gap[0].sort().values, all_rows.gap[0].sort().values[:3])


@pytest.mark.parametrize("wrong", [{"max_rows": 0}, {"field_cells": 0}, {"field_probes": 0}])
def test_no_room_at_all_is_refused(wrong):
    robot = load_robot("go2")
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is 0, expected at least 1"):
        PrimitiveCollider(robot.spec, robot.probes, **wrong)
    with pytest.raises(ValueError, match="rows is 0, expected at least 1"):
        rows().deepest(0)


def test_overflow_keeps_the_deepest_rows_and_is_counted():
    given = rows(masked=1)
    kept = given.deepest(4)
    assert kept.gap.shape == (5, 4)
    expected = torch.where(given.mask, given.gap, torch.inf).sort(-1).values[:, :4]
    torch.testing.assert_close(kept.gap.sort(-1).values, expected)
    assert torch.all(kept.overflow == 3)
    assert torch.all(given.overflow == 0)


@torch.no_grad()
def test_the_feet_against_ground_are_blind_to_a_deck_and_the_feet_against_anything_are_not():
    robot = load_robot("go2")
    feet = tuple(p for p in robot.probes if p.name in robot.foot_geoms)
    state = torch.tensor(robot.home_state)[None].clone()
    state[:, 0], state[:, 2] = 1.3, 0.181 + 0.29
    flat, deck = scene(Terrain()), scene(Terrain.platform(0.181))
    for surfaces, differs in (("ground", False), ("any", True)):
        features = FixedContactFeatures(FixedContactConfig(surfaces=surfaces), robot.spec, feet)
        here, there = (features(features.observe(state, w)) for w in (flat, deck))
        assert here.shape == (1, features.out_size)
        assert torch.equal(here, there) is not differs


def test_an_encoder_is_rebuilt_from_its_manifest_and_bad_ones_are_refused():
    enc = encoder()
    robot = load_robot("go2")
    again = from_config(enc.config_json(), robot.spec)
    assert again.config == enc.config
    assert again.probes == enc.probes
    with pytest.raises(ValueError, match="not readable"):
        from_config({**enc.config_json(), "surprise": 1}, robot.spec)
    with pytest.raises(ValueError, match="pooling"):
        ContactEncoderConfig(pooling="max")
