"""Random numbers that do not come from rng are named by line."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Rng
from lockstep.watch.draws import recording_draws


def test_draws_are_named_with_their_lines() -> None:
    x, drop = torch.ones(2, 3, 4), nn.Dropout(0.5)
    with recording_draws() as draws:
        torch.randn_like(x)
        x.clone().uniform_()
        drop(x)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        random.random()
        np.random.rand()
    assert list(draws.others.values()) == ["randn_like", "uniform_"]
    assert all(place.startswith("test_draws.py:") for place in (*draws.others, *draws.dropout))
    assert len(draws.dropout) == 2 and draws.outside_torch == ["random", "numpy.random"]
    dropout, others, outside = draws.notes(exact=False)
    assert "dropout at test_draws.py" in dropout and "randn_like at test_draws.py" in others
    assert draws.notes(exact=True) == [outside] and "random and numpy.random" in outside


def test_what_is_keyed_or_not_random_is_not_named() -> None:
    x, number = torch.ones(2, 3, 4), torch.arange(2)
    with recording_draws() as draws:
        Rng.of(0, number, number).normal("noise", 3)
        nn.Dropout(0.5).eval()(x)
        nn.Dropout(0.0)(x)
        F.scaled_dot_product_attention(x, x, x)
        torch.zeros(3).sum()
    assert not draws.others and not draws.dropout and draws.notes(exact=False) == []
