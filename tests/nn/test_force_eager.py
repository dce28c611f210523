import threading

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


def test_a_rank_that_is_not_inside_runs_compiled_code(compiled):
    function, graphs = compiled
    inside, outside = threading.Event(), threading.Event()

    def other_rank():
        with force_eager():
            inside.set()
            outside.wait(10)
            function(torch.ones(2))

    with force_eager():  # so it is known as a rank
        pass
    other = threading.Thread(target=other_rank)
    other.start()
    assert inside.wait(10)
    function(torch.ones(2))
    assert len(graphs) == 1
    outside.set()
    other.join()
    assert len(graphs) == 1
