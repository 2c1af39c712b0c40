"""A report tells how an episode went, alone in one file, whatever the episode holds."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

from nerd_coupling.robots import load_robot
from nerd_coupling.terrain import Terrain
from nerd_coupling.worlds import MujocoWorlds
from nerd_mpc.episode import EpisodeRecord
from nerd_mpc.report import headline, plots, write_report

DECISIONS = 15
FIGURES = {"climb", "planning_time", "score", "on_plan_error", "plans"}


@pytest.fixture(scope="module")
def record():
    """The robot holds its home pose in front of a deck: nothing is planned, all else is real."""
    go2 = load_robot("go2")
    hold = torch.tensor(go2.home_ctrl)
    plan = hold.expand(2, 20, -1)
    with MujocoWorlds(go2, Terrain.platform(0.1), 2, threads=1) as worlds:
        states = [worlds.state]
        states += [worlds.step(hold.expand(2, -1)) for _ in range(DECISIONS)]
        engine = worlds.rollout(states[5], plan)[..., :3]
    ramp = torch.linspace(0.0, 0.05, 21)
    noise = torch.rand(DECISIONS, generator=torch.Generator().manual_seed(0))
    return EpisodeRecord(
        settings={
            "robot": "go2",
            "terrain": "T2",
            "height": 0.1,
            "dynamics": "nerd",
            "seed": 0,
            "plan": {"num_samples": 16, "dt": 0.02},
            "model": None,
            "machine": {"cpu": "<script>alert('cpu')</script>"},
        },
        outcome="timeout",
        states=torch.stack(states)[:, 0],
        controls=hold.expand(DECISIONS, -1),
        planning_ms=20.0 + 5.0 * noise,
        reward=-noise,
        score=-0.9 * noise,
        effective_samples=4.0 + noise,
        feet_on_deck=torch.zeros(DECISIONS, dtype=torch.int64),
        held=torch.zeros(DECISIONS, dtype=torch.int64),
        on_plan_error={h: 0.001 * h * (1.0 + noise) for h in (5, 10, 20)},
        plans_predicted=engine + ramp[:, None],
        plans_engine=engine,
        plan_decisions=torch.tensor([5, 10]),
        summary={
            "outcome": "timeout",
            "time_to_top_s": None,
            "peak_effort_fraction": 0.5,
            "planning_ms": {"median": 21.0, "p90": float("nan")},
            "held_out_error": {"20": 0.015},
        },
    )


@pytest.fixture(scope="module")
def figures(record):
    return plots(record)


@pytest.fixture(scope="module")
def folder(record, tmp_path_factory):
    """A report with a film strip and a video, in a folder that did not exist."""
    frames = torch.full((8, 54, 96, 3), 128, dtype=torch.uint8)
    path = tmp_path_factory.mktemp("report") / "out"
    assert write_report(record, frames, path, video="climb 1.mp4") == path / "report.html"
    return path


class _Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def _sources(page):
    return [attrs["src"] for _, attrs in _Page(page).tags if "src" in attrs]


def _pixels(png):
    return Image.open(io.BytesIO(png)).convert("RGB")


def test_a_report_needs_nothing_but_itself_and_its_video(folder):
    page = (folder / "report.html").read_text()
    pictures = [s for s in _sources(page) if s.startswith("data:image/png;base64,")]
    assert len(pictures) == 1 + len(FIGURES)
    for source in pictures:
        assert min(_pixels(base64.b64decode(source.partition(",")[2])).size) > 100
    assert [s for s in _sources(page) if s not in pictures] == ["climb%201.mp4"]
    assert not {tag for tag, _ in _Page(page).tags} & {"script", "link", "iframe"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert [p.name for p in folder.iterdir()] == ["report.html"]


def test_text_from_outside_is_shown_and_never_obeyed(record, tmp_path):
    hostile = replace(record, outcome="<img src=x onerror=alert(1)>")
    page = write_report(hostile, None, tmp_path, video='"><script>.mp4').read_text()
    tags = _Page(page).tags
    assert "script" not in {tag for tag, _ in tags}
    assert not any("onerror" in attrs for _, attrs in tags)
    assert "<script>alert('cpu')</script>" in _Page(page).text


def test_the_headline_tells_the_ending_the_deck_and_the_time(record):
    assert headline(record) == "Did not climb: time ran out, on T2 (0.1 m)"
    climbed = replace(record, outcome="climbed", summary={"time_to_top_s": 1.4})
    assert headline(climbed) == "Climbed T2 (0.1 m) in 1.40 s"
    assert headline(replace(record, outcome="odd", settings={})) == "Ended as odd"


def test_numbers_are_taken_from_the_record_and_missing_ones_say_so(record, folder):
    page = (folder / "report.html").read_text()
    tiles = {name: value for value, name in re.findall("<b>(.*?)</b><span>(.*?)</span>", page)}
    # The first decision is not counted; fifteen less one leaves an even number.
    later = sorted(record.planning_ms[1:].tolist())
    assert tiles["planning, median"] == f"{0.5 * (later[6] + later[7]):.3g} ms"
    worst = sorted(record.on_plan_error[20].tolist())
    assert tiles["on-plan error, 20 steps"] == f"{1000.0 * worst[7]:.3g} mm"
    assert tiles["reached the top"] == "n/a"
    assert tiles["most feet on deck"] == "0"
    assert tiles["peak effort, of its limit"] == "50 %"
    text = _Page(page).text
    assert text[text.index("planning time [ms]: 90 %") + 1] == "n/a"


def test_the_same_record_gives_the_same_figures(record, figures):
    assert set(figures) == FIGURES
    assert plots(record) == figures


def test_figures_follow_the_record(record, figures):
    changed = replace(
        record,
        states=record.states + 0.1,
        planning_ms=2.0 * record.planning_ms,
        score=record.score - 1.0,
        on_plan_error={5: record.on_plan_error[5]},
        plans_predicted=record.plans_predicted - 0.02,
    )
    after = plots(changed)
    assert [name for name in FIGURES if figures[name] == after[name]] == []


def _spoiled(record, *, every):
    """NaN and infinity in every ``every``-th value of everything that can hold them."""

    def spoil(values):
        values = values.clone()
        values[::every] = torch.nan
        values[every - 1 :: 2 * every] = torch.inf
        return values

    names = ("states", "controls", "planning_ms", "reward", "score", "effective_samples")
    names += ("plans_predicted", "plans_engine")
    fields = {name: spoil(getattr(record, name)) for name in names}
    errors = {h: spoil(e) for h, e in record.on_plan_error.items()}
    return replace(record, **fields, on_plan_error=errors)


def _stopped_at_once(record):
    """Interrupted before the first decision was done."""
    none = {
        name: getattr(record, name)[:0] for name in ("controls", "planning_ms", "reward", "score", "effective_samples")
    }
    return replace(
        record,
        outcome="interrupted",
        states=record.states[:1],
        feet_on_deck=record.feet_on_deck[:0],
        held=record.held[:0],
        on_plan_error={},
        plans_predicted=torch.empty(1, 0, 3),
        plans_engine=torch.empty(1, 0, 3),
        plan_decisions=torch.tensor([0]),
        summary={},
        **none,
    )


@pytest.mark.parametrize(
    "change",
    [lambda r: _spoiled(r, every=3), lambda r: _spoiled(r, every=1), _stopped_at_once],
    ids=["some values are not finite", "no value is finite", "no decision was made"],
)
def test_a_broken_episode_still_gets_its_report(record, tmp_path, change):
    broken = change(record)
    frames = torch.zeros(len(broken.states), 54, 96, 3, dtype=torch.uint8)
    page = write_report(broken, frames, tmp_path).read_text()
    assert len(_sources(page)) == 1 + len(FIGURES)


def test_a_success_is_shaded_in_the_climb(record, figures):
    held = torch.zeros(DECISIONS, dtype=torch.int64)
    held[6:10] = torch.arange(1, 5)
    plain, shaded = figures["climb"], plots(replace(record, held=held))["climb"]
    plain, shaded = _pixels(plain), _pixels(shaded)
    # Green over white in the lowest panel, where nothing else is drawn above zero feet.
    row = int(0.75 * plain.height)
    greens = [
        sum(p[1] > p[0] + 15 for p in (image.getpixel((x, row)) for x in range(plain.width)))
        for image in (plain, shaded)
    ]
    assert greens[0] == 0
    # Four of fifteen decisions, on an axis that spans most of the picture.
    assert 0.15 * plain.width < greens[1] < 0.35 * plain.width


def test_a_report_refuses_frames_that_belong_to_no_such_episode(record, tmp_path):
    frames = torch.zeros(13, 54, 96, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="13 pictures: no every k-th of 16 states"):
        write_report(record, frames, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_never_replaces_one(record, tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        write_report(record, None, tmp_path)
    assert (tmp_path / "report.html").read_text() == "mine"
