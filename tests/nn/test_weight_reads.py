import torch
from torch import nn

from hybridpp.nn.weight_reads import WeightReads


def reads_of(run, **options):
    """The weights of a model with two layers that something else than their modules reads."""

    class Model(nn.Sequential):
        def forward(self, x):
            run(self, x)

    model, found = Model(nn.Linear(2, 2), nn.Linear(2, 2)), []
    readers = {name: [model.get_submodule(name.partition(".")[0])] for name, _ in model.named_parameters()}
    with WeightReads(model, readers, found.append, **options).watched():
        model[0].weight.norm()  # the model does not run
        model(torch.ones(1, 2))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found


def test_calls_of_the_modules_that_hold_weights_are_no_reads():
    assert reads_of(lambda model, x: model[1](model[0](x))) == []


def test_operations_on_weights_while_their_modules_do_not_run_are_reads():
    def run(model, x):
        model[1].weight.norm()
        torch.stack([layer.bias for layer in model])

    assert reads_of(run) == ["1.weight", "0.bias", "1.bias"]


def test_a_weight_that_another_module_reads_while_it_runs_is_read():
    class Other(nn.Module):
        def forward(self, layer):
            return layer.weight.detach()

    assert reads_of(lambda model, x: Other()(model[0])) == ["0.weight"]


def test_metadata_and_writes_to_each_element_are_no_reads():
    def run(model, x):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-1, 1).mul_(0.5)
                assert (parameter.dtype, parameter.device) == (x.dtype, x.device)
                assert parameter.shape[0] == 2
                parameter.data_ptr()
                parameter.data = torch.ones(2, 2)

    assert reads_of(run) == []


def test_sizes_are_reads_where_they_count():
    assert reads_of(lambda model, x: model[0].weight.shape, with_sizes=True) == ["0.weight"]
