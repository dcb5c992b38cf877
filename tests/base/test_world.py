"""Ranks and world sizes, read from the variables that launchers set."""

import pytest

from z2all_ds.base.world import World


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, World(0, 1, 0, 1)),
        # torchrun
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, World(5, 8, 1, 4)),
        # the deepspeed launcher
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, World(3, 4, 1, 2)),
        # without a local size, all ranks are on this machine
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, World(1, 2, 1, 2)),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ""}, World(0, 2, 0, 2)),
    ],
)
def test_world_from_environment(environment: dict[str, str], expected: World) -> None:
    assert World.from_environment(environment) == expected


def test_the_environment_of_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    world = World.from_environment()
    assert (world.rank, world.world_size, world.is_main) == (1, 3, False)
    assert World().is_main
