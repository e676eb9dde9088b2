"""What a library has carried frees its memory, whoever still holds the library's tensors."""

import weakref

import pytest
import torch
from meshwright.executor.comm.buffers import alias_for_comm, release_comm_buffers


def storage_of(tensor: torch.Tensor) -> weakref.ref:
    return weakref.ref(tensor.untyped_storage())


def test_the_library_writes_to_the_same_memory():
    whole = torch.zeros(8)
    alias_for_comm(whole[2:6]).add_(1)
    assert whole.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("inference", [False, True])
def test_its_tensors_hold_nothing_when_it_has_carried_them(inference):
    with torch.inference_mode(inference):
        whole = torch.ones(8)
        memory, library = (
            storage_of(whole),
            [alias_for_comm(whole[2:6]), alias_for_comm(whole.view(torch.uint8))],
        )
        release_comm_buffers(library)
        assert whole.tolist() == [1.0] * 8
        del whole
    assert memory() is None
    assert [tensor.numel() for tensor in library] == [0, 0]


def test_what_autograd_follows_stays():
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    release_comm_buffers([alias_for_comm(weight[:2]), alias_for_comm(weight.detach().view(2, 2))])
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 4
