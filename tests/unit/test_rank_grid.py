"""Groups of every kind against an independent statement of Megatron-core's order, and their properties."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes.planning.groups.rank_grid import KINDS, RankGrid
from holmes.words import from_text, short, to_text

MEGATRON = {  # initialize_model_parallel's groups: the generator and the token it is asked for
    "dp_cp": ("dense", "dp-cp"),
    "dp": ("dense", "dp"),
    "cp": ("dense", "cp"),
    "mp": ("dense", "tp-pp"),
    "tp": ("dense", "tp"),
    "pp": ("dense", "pp"),
    "tp_dp_cp": ("dense", "tp-dp-cp"),
    "tp_dp": ("dense", "tp-dp"),
    "tp_cp": ("dense", "tp-cp"),
    "ep": ("expert", "ep"),
    "expt_tp": ("expert", "tp"),
    "tp_ep": ("expert", "tp-ep"),
    "tp_ep_pp": ("expert", "tp-ep-pp"),
    "expt_dp": ("expert", "dp"),
}


def megatron_groups(sizes: dict[str, int], order: str, token: str) -> list[list[int]]:
    """By brute force: a rank's coordinates count up in `order`, first fastest; ranks that agree in all axes but the
    token's are a group; groups by their lowest other coordinates."""
    axes = order.split("-")
    places = itertools.product(*(range(sizes[axis]) for axis in reversed(axes)))
    ranks = {tuple(reversed(place)): rank for rank, place in enumerate(places)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, rank in sorted(ranks.items(), key=lambda item: item[1]):
        others = tuple(at for axis, at in reversed(list(zip(axes, place, strict=True))) if axis not in token.split("-"))
        groups.setdefault(others, []).append(rank)
    return [groups[others] for others in sorted(groups)]


sizes_of_a_grid = st.tuples(*[st.integers(1, 4)] * 4).filter(lambda sizes: math.prod(sizes) <= 96)


@given(sizes_of_a_grid, st.integers(0, 10_000), st.randoms(use_true_random=False))
def test_every_kind_is_megatrons(sizes: tuple[int, ...], choice: int, shuffle: random.Random) -> None:
    tensor, context, data, pipeline = sizes
    width = tensor * context * data
    products = [p for p in range(1, width + 1) if width % p == 0]
    product = products[choice % len(products)]
    expert = next(e for e in range(1 + choice % product, 0, -1) if product % e == 0)
    order = list(range(width * pipeline))
    shuffle.shuffle(order)
    grid = RankGrid(
        order,
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=product // expert,
    )
    generators = {
        "dense": {"tp": tensor, "cp": context, "ep": 1, "dp": data, "pp": pipeline},
        "expert": {"tp": product // expert, "cp": 1, "ep": expert, "dp": width // product, "pp": pipeline},
    }
    for kind in KINDS:
        groups = grid.groups(kind).tolist()
        if kind in MEGATRON:
            generator, token = MEGATRON[kind]
            expected = megatron_groups(generators[generator], "tp-cp-ep-dp-pp", token)
            assert groups == [[order[rank] for rank in ranks] for ranks in expected]
            assert sorted(rank for ranks in groups for rank in ranks) == sorted(order)
        assert len(groups) == grid.count_of(kind)
        assert {len(ranks) for ranks in groups} == {grid.size_of(kind)}
        rows = {rank: row for row, ranks in enumerate(groups) for rank in ranks}
        assert [grid.row_of(kind, rank) for rank in order] == [rows.get(rank) for rank in order]
    pipelines = grid.groups("pp").tolist()
    assert grid.groups("embd").tolist() == [list(dict.fromkeys([ranks[0], ranks[-1]])) for ranks in pipelines]
    assert grid.groups("pos_embd").tolist() == [[ranks[0]] for ranks in pipelines]
    assert grid.groups("world").tolist() == [order]
    for rank in order:
        at = grid.coordinates_of(rank)
        assert at["pp"] == grid.stage_of(rank)
        assert order[at["tp"] + tensor * (at["cp"] + context * (at["dp"] + data * at["pp"]))] == rank


def test_deepspeeds_groups_are_among_them() -> None:
    """PipeModelDataParallelTopology has axes pipe, data, model, last fastest; experts are neighbours in a stage."""
    pipe, data, model = 2, 4, 2
    rank = {at: i for i, at in enumerate(itertools.product(range(pipe), range(data), range(model)))}
    grid = RankGrid(range(16), tensor=model, data=data, pipeline=pipe)
    expected = {
        "pp": [[rank[p, d, m] for p in range(pipe)] for d in range(data) for m in range(model)],
        "dp": [[rank[p, d, m] for d in range(data)] for p in range(pipe) for m in range(model)],
        "tp": [[rank[p, d, m] for m in range(model)] for p in range(pipe) for d in range(data)],
        "mp": [sorted(rank[p, d, m] for p in range(pipe) for m in range(model)) for d in range(data)],
    }
    for kind, groups in expected.items():
        assert grid.groups(kind).tolist() == groups, kind
    experts = RankGrid(range(16), data=16, expert=4)
    assert experts.groups("ep").tolist() == [list(range(i, i + 4)) for i in range(0, 16, 4)]
    assert experts.groups("expt_dp").tolist() == [list(range(i, 16, 4)) for i in range(4)]


def test_kinds_in_use() -> None:
    assert RankGrid(range(8), data=4, pipeline=2).kinds() == ["dp", "pp", "embd"]
    grid = RankGrid(range(32), tensor=2, context=2, data=4, pipeline=2, expert=4, expert_tensor=1)
    assert grid.kinds() == [kind for kind in KINDS if kind not in ("pos_embd", "expt_tp", "tp_ep", "world")]
    with pytest.raises(ValueError, match="no groups of kind 'sp'; kinds are dp_cp, dp, cp"):
        grid.groups("sp")


@given(st.lists(st.integers(0, 40), unique=True))
def test_numbers_as_text(numbers: list[int]) -> None:
    assert from_text(to_text(numbers)) == tuple(numbers)


def test_text_is_short() -> None:
    assert to_text([*range(8), *range(16, 31, 2), 5, 9, 11]) == "0-7,16-30:2,5,9,11"
    assert to_text(range(100_000)) == "0-99999"
    assert from_text(7) == (7,)
    assert short(range(20), 2) == "[0, 1, ... 20 in all]"
    for wrong in ("3-1", "a", "1-5:0", "-2", "1--2"):
        with pytest.raises(ValueError, match="is no run of numbers; write 3, 0-7 or 0-14:2"):
            from_text(wrong)


def test_what_is_waited_for_goes_first() -> None:
    at = {priority: {kind for kind in KINDS if KINDS[kind].priority == priority} for priority in (3, 1, 0)}
    assert at == {
        3: {"pp"},
        1: {"dp_cp", "dp", "embd", "pos_embd", "tp_dp_cp", "tp_dp", "expt_dp"},
        0: {"world"},
    }
    assert {KINDS[kind].priority for kind in ("tp", "cp", "ep", "mp")} == {2}
