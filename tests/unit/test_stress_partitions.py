"""Partitions of an elastic job: how they are made, and who watches what its ranks do meanwhile."""

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs typer: pip install '.[lab]'")

from holmes.lab.stress.elastic.expected import DECAY, gradient, unbroken
from holmes.lab.stress.elastic.partitions import NODES, cut_pairs, describe, set_partitions
from holmes.lab.stress.elastic.witness import FolderWitness, StepWitness

ALL = (*NODES, "head")


def test_five_can_be_split_in_52_ways_each_once():
    found = list(set_partitions(ALL))
    assert len(found) == len({frozenset(partition) for partition in found}) == 52
    for partition in found:
        assert sorted(name for block in partition for name in block) == sorted(ALL)


def test_a_split_cuts_whoever_is_in_different_blocks_and_nobody_else():
    partition = (frozenset({"a0", "head"}), frozenset({"a1", "b0"}), frozenset({"b1"}))
    assert describe(partition) == "a0 store | a1 b0 | b1"
    pairs = {frozenset(pair) for pair in cut_pairs(partition)}
    assert len(pairs) == 2 * 2 + 2 + 2
    assert frozenset({"a1", "b0"}) not in pairs
    assert frozenset({"a0", "b1"}) in pairs
    assert cut_pairs((frozenset(ALL),)) == []


def step(generation, number, began_s, value=None):
    value = unbroken(number + 1) if value is None else value
    return {"node": "a0", "generation": generation, "step": number, "began_s": began_s, "value": value}


def test_steps_of_one_generation_after_another_are_right():
    witness = StepWitness(DECAY, gradient)
    for told in (step(1, 0, 0.0), step(1, 1, 1.0), step(2, 1, 1.5), step(2, 2, 2.0), step(4, 3, 3.0)):
        witness.hear(told)
    assert witness.take_problems() == []
    assert (witness.count, witness.generations) == (5, 3)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([step(1, 0, 0.0), step(2, 1, 1.0), step(1, 1, 1.2)], "generation 1 still trained 0.200 s after 2 began"),
        ([step(1, 0, 2.0), step(2, 1, 3.0), step(3, 1, 1.9)], "generation 1 still trained 0.100 s after 3 began"),
        ([step(1, 0, 0.0), step(1, 1, 1.0, value=7.0)], "a0 had 7.0 after step 1, not"),
    ],
)
def test_two_generations_at_a_time_and_wrong_weights_are_told_once(told, says):
    witness = StepWitness(DECAY, gradient)
    for entry in told:
        witness.hear(entry)
    assert any(says in problem for problem in witness.take_problems())
    assert not [problem for problem in witness.take_problems() if says in problem]


def checkpoint(folder: Path, number: int, generation: int) -> None:
    path = folder / f"step-{number:08d}-generation-{generation:04d}"
    path.mkdir()
    (path / ".metadata").touch()


def test_a_checkpoint_of_an_earlier_generation_is_told_once_the_folder_is_claimed(tmp_path: Path):
    witness = FolderWitness(tmp_path)
    (tmp_path / "generation-0001.claim").touch()
    checkpoint(tmp_path, 10, 1)
    (tmp_path / "generation-0002.claim").touch()
    witness.look()
    assert witness.take_problems() == []  # whether it was before or after the claim nobody saw
    (tmp_path / "step-00000020-generation-0001").mkdir()
    witness.look()
    assert witness.take_problems() == []  # not complete
    checkpoint(tmp_path, 30, 1)
    checkpoint(tmp_path, 20, 2)
    witness.look()
    assert witness.take_problems() == [
        "step-00000030-generation-0001 was completed after generation 2 had claimed the folder"
    ]
    assert witness.count == 3
