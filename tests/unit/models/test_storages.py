"""Counting storages that are alive."""

import pytest
import torch
from meshwright.models.units.storages import LiveStorages, OverBudgetError, scratch_of


def test_storages_count_once_and_until_they_are_freed():
    with LiveStorages() as live:
        first = torch.zeros(100)
        view = first[10:20].view(2, 5)
        assert live.now == 400
        second = first + 1
        assert live.now == live.peak == 800
        del first
        assert live.now == 800  # the view holds it
        del view, second
        assert live.now == 0
        assert live.peak == 800


def test_what_is_left_out_never_counts():
    held = torch.zeros(1000)
    with LiveStorages() as live:
        live.ignore([held])
        assert held[:10].sum().item() == 0
        live.add([held])
        assert live.peak < 100


def test_labels_say_who_made_what_is_alive():
    at = ["first"]
    with LiveStorages(lambda: at[0]) as live:
        a = torch.zeros(10)
        at[0] = "second"
        b = torch.zeros(20)
        assert live.bytes_by_label() == {"first": 40, "second": 80}
        del a, b


def test_a_budget_raises_at_the_operator_that_passes_it():
    said = r"take 1,200 bytes at 'unit' and 1,000"
    with LiveStorages(lambda: "unit", limit_bytes=1000) as live:
        kept = [torch.zeros(200)]
        with pytest.raises(OverBudgetError, match=said) as caught:
            kept.append(torch.zeros(100))
        assert (caught.value.needed_bytes, caught.value.limit_bytes) == (1200, 1000)
        assert isinstance(caught.value, MemoryError)
        assert live.now == 800 or len(kept) == 1


def test_the_meta_device_counts_what_it_would_take():
    with LiveStorages() as live, torch.device("meta"):
        x = torch.empty(2**20, 2**14)
        assert live.now == 4 * 2**34
        del x


class Took:
    """An operator's scratch memory: so much for each, in turn."""

    def __init__(self, *sizes):
        self.sizes, self.under_way = list(sizes), False

    def begin(self):
        assert not self.under_way
        self.under_way = True

    def end(self):
        self.under_way = False
        return self.sizes.pop(0)


def test_scratch_memory_counts_for_a_moment():
    seen = []
    took = Took(0, 1000, 0)
    with LiveStorages(seen=lambda live: seen.append(live.now), scratch=took) as live:
        first = torch.zeros(100)
        second = first + 1
        assert live.now == 800
        assert live.peak == 1800
        third = second + 1
        assert live.peak == 1800
        del first, second, third
    assert seen == [400, 800, 1800, 1200]


def test_a_gpus_allocator_tells_of_scratch_memory(monkeypatch):
    told = {"memory_allocated": [100, 150], "max_memory_allocated": [900]}
    for name, values in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, values=values: values.pop(0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    scratch = scratch_of(torch.device("cuda", 0))
    scratch.begin()
    assert scratch.end() == 900 - 150  # beyond what the operator has left
    assert scratch_of(torch.device("cpu")) is None
