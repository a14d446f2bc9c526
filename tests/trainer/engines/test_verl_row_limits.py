"""What the model that verl's engine builds can take of a row; needs torch alone."""

from types import SimpleNamespace

import pytest
import torch

from trainer.engines.verl.rows import limits_of
from trainer.experience.limits import Limits

pytestmark = pytest.mark.group("engines")


class Learnt(torch.nn.Module):
    """A model with a table of positions."""

    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(60, 2)
        self.wpe = torch.nn.Embedding(16, 2)


def test_a_learned_position_table_bounds_the_row_length():
    config = SimpleNamespace(vocab_size=60, max_position_embeddings=16)
    assert limits_of(Learnt(), config, [None, None]) == Limits(60, 16, "the model's table of positions")


def test_rotary_positions_do_not_bound_the_row_length():
    config = SimpleNamespace(vocab_size=60, max_position_embeddings=16)
    found = limits_of(torch.nn.Embedding(60, 2), config, [None, None])
    assert (found.vocabulary, found.tokens) == (60, None)


def test_the_smallest_bound_applies():
    config = SimpleNamespace(vocab_size=60)
    assert limits_of(Learnt(), config, [40, 12]).tokens == 12
    assert limits_of(Learnt(), config, [40, None]).tokens == 16
