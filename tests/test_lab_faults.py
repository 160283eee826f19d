"""The lab's fault list does harm without a proxy and none behind ours; on the stand-in, to have it soon."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.faults import FAULTS
from lab.fronts import ByHand, Eccon, Front
from lab.table import put, table
from lab.world import World
from tests.contract.target import SimTarget

NAMES = ("by-hand", "guide", "eccon", "guarded")
"""Of the files of results."""
TRIED = ("item-waits", "model-path")
"""Those that do not hang on who is faster."""


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    target = SimTarget(tmp_path)
    front: Front = Eccon(tmp_path) if request.param == "eccon" else ByHand()
    made = World(target, front)
    try:
        yield made
    finally:
        made.close()
        target.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", ["by hand", "eccon"], indirect=True)
def test_what_happens(world: World) -> None:
    harmed = set()
    for fault in FAULTS:
        if fault.name not in TRIED:
            continue
        world.prepare(fault.room)
        fault.act(world)
        seen = world.conclude()
        if seen.pd_died or seen.wrong or seen.failed:
            harmed.add(fault.name)
    assert harmed == (set() if isinstance(world.front, Eccon) else set(TRIED))


def test_the_readme_shows_what_was_measured() -> None:
    """Every fault behind every front, and not a figure by hand."""
    root = Path(__file__).parent.parent
    text = (root / "README.md").read_text("utf-8")
    files = [root / "lab" / "measured" / f"{name}.json" for name in NAMES]
    for file in files:
        assert set(json.loads(file.read_text("utf-8"))["faults"]) == {f.name for f in FAULTS}, file
    assert put(text, table(files)) == text


def test_a_text_without_a_place_for_the_table() -> None:
    with pytest.raises(ValueError, match="faults"):
        put("# Title\n<!-- faults -->\n", "| |")
