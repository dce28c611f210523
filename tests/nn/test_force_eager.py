import pytest
import torch

from hybridpp.nn.force_eager import force_eager


@pytest.fixture
def compiled():
    """A compiled function, with the number of its graphs."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    yield torch.compile(lambda x: x + 1, backend=count), graphs
    torch._dynamo.reset()


def test_compiled_code_runs_eagerly_inside_and_not_outside(compiled):
    function, graphs = compiled
    with force_eager():
        function(torch.ones(2))
    assert not graphs
    function(torch.ones(2))
    assert len(graphs) == 1


def test_ranks_of_one_process_may_leave_in_any_order(compiled):
    function, graphs = compiled
    first, second = force_eager(), force_eager()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    function(torch.ones(2))
    assert not graphs
    second.__exit__(None, None, None)
    function(torch.ones(2))
    assert len(graphs) == 1
