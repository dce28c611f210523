"""Functions between compiled graphs."""

import torch

from hybridpp.nn.uncompiled import uncompiled


def test_the_compiler_does_not_look_into_them():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    compiling = []

    def looks(x):
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    def function(x):
        return uncompiled()(looks, x + 1) - 1

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(function, backend=counter)
    call = uncompiled()
    assert call is uncompiled()
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert compiling == [False, False]
    assert len(counter.graphs) == 2
