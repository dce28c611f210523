from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from hybridpp.partition.containers import flatten, tensors_in

A, B, C, D = (torch.full((1,), float(n)) for n in range(4))
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    held: object


@pytest.mark.parametrize(
    "tree",
    [
        A,
        None,
        (),
        ((A, [B, 1, "x"]), {"c": C, "d": {"e": (D, torch.float32, A.device)}}),
        {"b": B, "a": A},
        [A, Pair(B, [C]), D],
        (A, OrderedDict(b=B, a=C), defaultdict(list, d=[D])),
        (A, Record((B, Record({"c": C}))), D),
        (A, SimpleNamespace(b=[B]), C),
        (A, BaseModelOutput(last_hidden_state=B, hidden_states=(C, D)), 1.0),
        (torch.nn.Parameter(A), torch.Size([1]), B),
        (A, {B}, object(), C),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_tensors_are_those_among_the_leaves_in_their_order(tree):
    assert list(map(id, tensors_in(tree))) == [id(leaf) for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
