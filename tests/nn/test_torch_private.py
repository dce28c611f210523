"""Private names of torch are in one file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT
from torch import nn

from hybridpp.nn import torch_private

HOME = ROOT / "hybridpp/nn/torch_private.py"
SOURCES = [
    path for top in ("hybridpp", "plugins", "examples") for path in sorted((ROOT / top).rglob("*.py")) if path != HOME
]
# Private by convention of Python's, or of a library that is none of torch's: named tuples, frames, transformers.
NOT_TORCHS = {
    "_exit",
    "_current_frames",
    "_asdict",
    "_fields",
    "_getframe",
    "_replace",
    "_shutdown",
    "_can_set_experts_implementation",
    "_init_weights",
    "_is_stateful",
    "_supports_default_dynamic_cache",
}
OBJECTS = (
    torch,
    torch.Tensor,
    torch.UntypedStorage,
    torch.autograd.Function,
    torch.distributed,
    torch.nn.functional,
    nn.LSTM(1, 1),
    nn.Parameter(),
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.DataLoader([0]),
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


TORCHS = {name for thing in OBJECTS for name in dir(thing) if is_private(name)}


def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Private names that the sources define themselves."""
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_self(node.value)}
    return {name for name in names if is_private(name)}


def is_self(node: ast.expr) -> bool:
    """Whether a name on it may be a class's own: what it defines, or overrides."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def uses(nodes: list[ast.AST], own: set[str]) -> Iterator[tuple[int, str]]:
    """Lines with a private name of torch's, and the name."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", "") or ""
            for name in (f"{module}.{alias.name}" for alias in node.names):
                if name.lstrip(".").startswith("torch") and any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            # Torch's are so whatever they are read from; others only where nothing of ours has the name.
            if node.attr in TORCHS or not (node.attr in own or node.attr in NOT_TORCHS):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value in TORCHS or node.value.startswith("torch._") else []
            yield from ((node.lineno, name) for name in names)


def test_private_names_of_torch_are_in_one_file():
    nodes = {path: nodes_of(path.read_text()) for path in SOURCES}
    own = own_names([node for found in nodes.values() for node in found])
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}" for path, found in nodes.items() for line, name in uses(found, own)
    ]
    assert not bad, "\n".join([f"read these in {HOME.relative_to(ROOT)}:", *bad])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch._subclasses.fake_tensor import FakeTensor", "torch._subclasses.fake_tensor.FakeTensor"),
        ("import torch._dynamo", ".torch._dynamo"),
        ("torch._C._current_graph_task_id()", "torch._C._current_graph_task_id"),
        ("x._version", "x._version"),
        ("module.inner._parameters['weight']", "module.inner._parameters"),
        ("vars(module)['_buffers'] = {}", "_buffers"),
        ("group._get_backend(device)", "group._get_backend"),
    ],
)
def test_a_planted_use_is_found(source, name):
    found = list(uses(nodes_of(f"\n{source}"), own={"_version", "_mine"}))
    assert (2, name) in found


@pytest.mark.parametrize(
    "source", ["self._buffers", "super()._init_group()", "other._mine", "x.__dict__", "t._replace()"]
)
def test_names_of_our_own_pass(source):
    assert not list(uses(nodes_of(source), own={"_mine"}))


def test_the_names_were_read_in_the_release_that_tests_run_with():
    (pinned,) = (line for line in Path(ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert f"torch {pinned.removeprefix('torch==')}." in torch_private.__doc__


def test_every_name_is_used_outside():
    text = "".join(path.read_text() for path in SOURCES)
    assert [name for name in torch_private.__all__ if name not in text] == []


def test_storage_id_is_that_of_the_memory():
    base = torch.zeros(4)
    assert torch_private.storage_id(base) == torch_private.storage_id(base[1:].view(3, 1))
    assert torch_private.storage_id(base) != torch_private.storage_id(base.clone())


def test_takes_kwargs_says_it_of_both_kinds_of_hooks():
    module = nn.Identity()
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        assert not torch_private.takes_kwargs(module, register(lambda *_: None).id)
        assert torch_private.takes_kwargs(module, register(lambda *_: None, with_kwargs=True).id)


def test_unwrapped_is_the_tensor_inside_transforms():
    found = []
    torch.vmap(lambda x: found.append(torch_private.unwrapped(x)) or x)(torch.arange(3))
    assert torch.equal(found[0], torch.arange(3))


def test_tensors_of_inference_mode_have_no_version():
    with torch.inference_mode():
        kept = torch.zeros(1)
    counted = torch.zeros(1)
    before = torch_private.version_or_none(counted)
    counted.add_(1)
    assert torch_private.version_or_none(kept) is None
    assert torch_private.version_or_none(counted) == before + 1


def test_fake_and_meta_tensors_have_no_data():
    with torch_private.FakeTensorMode():
        fake = torch.empty(1)
    assert torch_private.has_no_data(fake)
    assert torch_private.has_no_data(torch.empty(1, device="meta"))
    assert not torch_private.has_no_data(torch.empty(1))


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("tensor", [torch.ones(2, 3).t(), torch.ones(0, 2), torch.empty(3, device="meta")])
def test_a_fake_parameter_is_as_one_that_torch_makes_of_a_fake(tensor, requires_grad):
    mode = torch_private.FakeTensorMode()
    with mode:
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=torch.bfloat16)
        expected = nn.Parameter(like, requires_grad)
    given = nn.Parameter(tensor, requires_grad)
    made = torch_private.FakeSpec.of(given, torch.bfloat16, torch.device("cpu")).make(mode)
    assert isinstance(made, nn.Parameter)
    assert isinstance(made, torch_private.FakeTensor)
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "_version"):
        assert getattr(made, name) == getattr(expected, name), name
    assert made.stride() == expected.stride() == tensor.stride()
    assert vars(made).keys() == vars(expected).keys()


def test_a_fake_of_a_tensor_is_no_parameter_and_has_no_gradient():
    spec = torch_private.FakeSpec.of(torch.ones(2, requires_grad=True), torch.float32, torch.device("cpu"))
    made = spec.make(torch_private.FakeTensorMode())
    assert not isinstance(made, nn.Parameter)
    assert not made.requires_grad
