"""What torch's allocator of GPU memory is asked for."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.launch import start
from meshwright.executor.launch.start import ALLOCATOR_VARIABLES, let_segments_grow

NAME = "_accelerator_setAllocatorSettings"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, NAME, found.append, raising=False)
    return found


def test_segments_grow_on_gpus(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "keep_freed_memory", lambda: True)
    start._with_memory(torch.device("cpu"))
    assert asked == []
    start._with_memory(torch.device("cuda", 0))
    assert asked == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_users_own_settings_stay(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not let_segments_grow()
    assert asked == []


def test_a_torch_without_the_setting_is_left_alone(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, NAME)
    assert not let_segments_grow()


def test_this_torch_takes_the_setting() -> None:
    """Where it was built for GPUs; else nothing reads it."""
    set_to = getattr(torch._C, NAME, None)
    if set_to is None:
        pytest.skip("this torch has no such setting")
    set_to("expandable_segments:True")
