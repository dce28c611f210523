import torch

from hybridpp.nn.half import widened


def test_only_half_precision_is_widened():
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
    assert [widened(torch.zeros(1, dtype=dtype)).dtype for dtype in dtypes] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.float64,
        torch.int64,
    ]


def test_what_is_not_half_stays_the_same_tensor():
    wide = torch.zeros(1)
    assert widened(wide) is wide
