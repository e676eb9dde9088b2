"""What hosts must have alike, and how it is said where they have not."""

from __future__ import annotations

import pytest
import torch
from meshwright import InputError
from meshwright.executor.comm.setups import (
    HostSetup,
    check_versions,
    digest_text,
    other_devices,
    setup_here,
)


def setup(host: str, torch_: str = "2.13.0", python: str = "3.11.2", **more) -> HostSetup:
    software = (("meshwright", "0.1.0"), ("python", python), ("torch", torch_))
    return HostSetup(host=host, software=software, **{"device": "cpu (x)", "gpus": 0, **more})


def test_ranks_of_one_host_are_named_by_it():
    four = [setup("a"), setup("a"), setup("b", "2.12.0"), setup("c")]
    with pytest.raises(InputError) as raised:
        check_versions(four)
    assert str(raised.value) == (
        "hosts have different versions of torch: 2.13.0 on a, c and 2.12.0 on b; install the same "
        "on all of them"
    )


def test_a_host_that_differs_from_rank_to_rank_names_them():
    with pytest.raises(InputError, match=r"2\.13\.0 on rank 0 of a, b and 2\.12\.0 on rank 1 of a"):
        check_versions([setup("a"), setup("a", "2.12.0"), setup("b")])


def test_a_python_of_another_patch_is_no_other():
    check_versions([setup("a"), setup("b", python="3.11.9")])
    with pytest.raises(InputError, match=r"python: 3\.11 on a and 3\.12 on b"):
        check_versions([setup("a"), setup("b", python="3.12.2")])


def test_other_devices_are_said():
    assert other_devices([setup("a"), setup("b", torch_="2.12.0")]) is None
    gpus = [setup("a", device="H100", gpus=8), setup("b", device="H100", gpus=4)]
    said = other_devices(gpus)
    assert said is not None
    assert said.startswith("hosts have different devices: 8 x H100 on a and 4 x H100 on b;")


def test_what_is_compared_is_all_but_the_name():
    assert digest_text(setup("a")) == digest_text(setup("b", python="3.11.9"))
    others = [setup("a", "2.12.0"), setup("a", device="y"), setup("a", gpus=1)]
    assert len({digest_text(s) for s in (setup("a"), *others)}) == 4


def test_this_host():
    here = setup_here(torch.device("cpu"))
    assert dict(here.software)["torch"] == str(torch.__version__)
    assert here.gpus == 0
