"""TARGET: how a user names what is to be trained, and the Workload that it stands for."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.schema.errors import InputError
from ..planner.schema.precision import Precision, check_precision
from .compiled import eagerly, uncompiled, unwrapped
from .failing import in_module
from .lazy_parameters import given_shapes, with_shapes
from .opened import tensors_in
from .precision import measured_in
from .replay import preserved
from .trial_sizes import SIZES, first_taken
from .units.batch_dims import located, with_dims
from .workload import Batch, Workload, device_of
from .zoo import build, is_known

# What a rank is taken to feed of a ``Workload``, which makes batches of any size.
WORKLOAD_SAMPLES = 32
HOW = (
    "give a workload's name, path/to/file.py:factory or package.module:factory, where the factory "
    "takes no argument and returns a Workload"
)


class NoFileError(InputError):
    """A target whose file is not there."""


class RefusedError(InputError):
    """A model or a make_batch that fails at one size of a batch: it may take another."""


def planned(target: str, precision: Precision | None = None, *, seed: int = 0) -> Workload:
    """The workload of a plan's target, whose file is named as seen from where it was planned, to
    compute in the plan's precision; its parameters are drawn with ``seed``."""
    if ":" not in target and not is_known(target):
        raise InputError(
            f"the plan is of the model {target!r} of a script, which trains it itself: start it by "
            "'meshwright launch PLAN SCRIPT'; to verify a plan, make it from a file.py:factory"
        )
    try:
        return replace(workload(target, seed=seed), precision=precision)
    except NoFileError:
        raise InputError(
            f"there is no file {target.rpartition(':')[0]} here, which the plan names: run this "
            "from the folder where it was planned, or plan again here"
        ) from None


def workload(target: str | Workload, *, seed: int = 0, precision: str | None = None) -> Workload:
    """The workload that ``target`` names, under that name; a Workload is returned as it is, but to
    compute in ``precision`` where one is given. Its batches say where their samples are.

    Its parameters are drawn with ``seed``, so that every process builds the same; the caller's
    random state is left alone. Raises ``InputError`` with the remedy.
    """
    chosen = check_precision(precision)
    if chosen is not None:
        return replace(workload(target, seed=seed), precision=chosen)
    if isinstance(target, Workload):
        return located(with_shapes(target))
    if not isinstance(target, str):
        raise InputError(
            f"got {type(target).__name__} as target, expected a workload's name, file.py:factory "
            "or a meshwright.Workload, which Workload(name, model, make_batch, loss) makes"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if ":" in target:
            return _from_factory(target)
        if target.endswith(".py"):
            raise InputError(f"{target!r} names no factory: write {target}:factory")
        try:
            return build(target)
        except ValueError as error:
            raise InputError(str(error)) from None


def _from_factory(target: str) -> Workload:
    where, _, name = target.rpartition(":")
    module = _file(where) if where.endswith(".py") else _module(where)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise InputError(f"{where} has no function {name!r}: {HOW}")
    try:
        made = factory()
    except InputError:
        raise  # a sentence of the factory's own
    except SystemExit as error:
        raise InputError(_ended(f"factory {target!r}")) from error
    except Exception as error:
        raise InputError(
            f"factory {target!r} failed with {_said(error)}; it is called without arguments and "
            "returns a Workload(name, model, make_batch, loss)"
        ) from error
    if not isinstance(made, Workload):
        raise InputError(
            f"factory {target!r} returned {type(made).__name__}, expected a meshwright.Workload: "
            "return Workload(name, model, make_batch, loss)"
        )
    made = with_shapes(replace(made, name=target))
    return located(made)  # plans name it so, and it is found again by that


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # the command's own folder leads sys.path, not the user's
    try:
        with _values():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {error.name!r} for {name!r}: {HOW}") from None
    except SystemExit as error:
        raise InputError(_ended(f"importing {name}")) from error
    except Exception as error:
        raise InputError(f"importing {name} failed with {_said(error)}; mend it") from error


def _file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise NoFileError(f"there is no file {path}: {HOW}")
    # A name of its own, so that a file called torch.py or test.py hides nothing.
    name = f"_meshwright_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as dataclasses and pickle look their module up
    # Last, so that what lies beside the file can be imported and hides nothing either.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        with _values():
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise InputError(_ended(f"running {path}")) from error
    except Exception as error:
        raise InputError(f"running {path} failed with {_said(error)}; mend it") from error
    return module


@contextmanager
def _values() -> Iterator[None]:
    """What a module makes when it is imported has values, though a model is to be built without:
    it stays for all that is built later."""
    without = torch.get_default_device().type == "meta"
    with torch.device("cpu") if without else nullcontext():
        yield


def _ended(what: str) -> str:
    return (
        f"{what} ended the process: put what reads arguments and trains under "
        "if __name__ == '__main__', so that the factory can be called without it"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def own_batch(chosen: Workload, size: int) -> Batch:
    """What ``make_batch`` makes; ``InputError`` where that is no batch of ``size`` samples."""
    # As objects: what a user's function returns is not always what its type says.
    try:
        batch: object = chosen.make_batch(size)
    except Exception as error:
        raise RefusedError(
            f"make_batch({size}) of {chosen.name!r} failed with {_said(error)}; mend it"
        ) from error
    wanted = f"return meshwright.Batch((x,), target) with {size} samples"
    if not isinstance(batch, Batch):
        made = type(batch).__name__
        raise InputError(f"make_batch({size}) of {chosen.name!r} returned a {made}: {wanted}")
    args: object = batch.args
    if not isinstance(args, tuple | list):
        made = type(args).__name__
        by_name = ", those by name as Batch((), target, kwargs={...})"
        raise InputError(
            f"make_batch({size}) of {chosen.name!r} gave the model's arguments as a {made}, "
            f"expected a tuple: {wanted}{by_name if isinstance(args, dict) else ''}"
        )
    try:
        found = batch.size
    except ValueError as error:
        raise InputError(f"make_batch({size}) of {chosen.name!r}: {error}: {wanted}") from None
    _check_nested(batch, f"make_batch({size}) of {chosen.name!r} gave")
    if found != size:
        _check_lists(batch, f"make_batch({size}) of {chosen.name!r} gave")
        raise InputError(
            f"make_batch({size}) of {chosen.name!r} gave {found} samples, as dim 0 of the first "
            f"tensor counts them where no dim follows the size that is asked for: {wanted}"
        )
    return batch


def check_batches(chosen: Workload) -> None:
    """``InputError`` where ``make_batch`` makes none of ``SIZES``, or something that is no batch of
    the size that it is asked for."""
    first_taken(SIZES, lambda size: own_batch(chosen, size), RefusedError)


@contextmanager
def trial(chosen: Workload) -> Iterator[Workload]:
    """The workload to run a few samples through: eager, in its precision. Random state, buffers,
    gradients and training mode are put back."""
    with (
        uncompiled(chosen.model) as model,
        measured_in(replace(chosen, model=model), None) as run,
        preserved(run.model),
        eagerly(),
        torch.enable_grad(),  # a model or its loss may ask for gradients itself: forces, penalties
    ):
        yield run


def try_out(chosen: Workload, device: torch.device | str | None = None) -> int:
    """One forward and loss on a batch of the workload's own, without backward: of the first of
    ``SIZES`` that its model and its make_batch take, which is returned. The batch is moved to
    ``device``, by default the model's.

    Raises ``InputError`` with the error at the first of them where they take none; random state,
    buffers and training mode are left as they were.
    """
    with trial(chosen) as run:
        return first_taken(SIZES, lambda size: _try_size(chosen, run, size, device), RefusedError)


def _try_size(chosen: Workload, run: Workload, size: int, device: torch.device | str | None) -> int:
    own_batch(chosen, size)
    try:
        batch = run.make_batch(size).to(device or device_of(run.model))
        loss = run.loss(run.model(*batch.args, **batch.kwargs), batch.target)
    except InputError:
        raise
    except Exception as error:
        raise RefusedError(
            f"the model of {chosen.name!r} failed on its own batch of {size}"
            f"{in_module(run.model, error)} with {_said(error)} (batches of "
            f"{', '.join(map(str, SIZES))} are tried); its model, make_batch and loss must fit "
            "together"
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the loss of {chosen.name!r} gave {what}, expected one number (a mean)")
    return size


def from_model(
    model: nn.Module,
    example_inputs: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Workload:
    """A workload around a bare model, to measure it with.

    ``example_inputs`` is a tensor, a tuple of positional arguments, a mapping of keyword arguments
    or a ``Batch`` with its target; without it the model's ``dummy_inputs`` (transformers) are
    taken. Which dims count the samples is found by running the model, unless the ``Batch`` says it.
    Batches of other sizes repeat its samples. ``loss(output, target)``: by default the
    output's own ``loss`` where it has one, else a mean of all outputs, which costs next to nothing.
    """
    example = example_batch(model, example_inputs)
    if loss is not None and example.target is None:
        raise InputError(
            "loss was given and example_inputs holds no target: pass "
            "example_inputs=meshwright.Batch(args, target)"
        )

    def make_batch(size: int) -> Batch:
        return example.take(torch.arange(size) % max(example.size, 1))

    return Workload(type(unwrapped(model)).__name__, model, make_batch, loss or default_loss)


def example_batch(model: nn.Module, inputs: Any) -> Batch:
    """``example_inputs`` (see ``from_model``) as a batch; ``InputError`` where there are none
    or they hold no samples."""
    if inputs is None:
        inputs = getattr(model, "dummy_inputs", None)
    if inputs is None:
        raise InputError(
            f"no example inputs for {type(model).__name__}: pass example_inputs=(x,) with tensors "
            "of a few samples, a dict of keyword arguments, or a meshwright.Workload as the model"
        )
    if isinstance(inputs, Batch):
        batch = inputs
    elif isinstance(inputs, Mapping):
        batch = Batch((), None, dict(inputs))
    else:
        batch = Batch(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), None)
    _check_nested(batch, f"example_inputs of {type(model).__name__} hold")
    given_shapes(model, batch)
    batch = with_dims(model, batch)
    if batch.batch_dims is None:
        _check_lists(batch, f"example_inputs of {type(model).__name__} hold")
    try:
        empty = batch.size == 0
    except ValueError:
        raise InputError(
            f"example_inputs of {type(model).__name__} hold no tensor with a batch dimension"
        ) from None
    if empty:
        raise InputError("example_inputs hold no samples: pass at least one, better a few")
    return batch


def _check_nested(batch: Batch, found: str) -> None:
    """Raises ``InputError`` for tensors of which no samples can be taken."""
    if any(t.is_nested for t in batch.tensors()):
        raise InputError(
            f"{found} a nested tensor, of which no samples can be taken: give it filled up to one "
            "length, with the lengths, and nest it in the model's forward"
        )


def _check_lists(batch: Batch, found: str) -> None:
    """Raises ``InputError`` where the first tensor lies in a list: what is shorter or longer by one
    sample may be the list (images of different sizes), and parts of a batch are cut off tensors.
    ``found`` says whose batch it is."""
    for name, value in (*enumerate(batch.args), *batch.kwargs.items()):
        if not tensors_in(value):
            continue
        if isinstance(value, list):
            raise InputError(
                f"{found} a list of length {len(value)} as argument {name!r}, of which no "
                "dimension counts the samples: wrap the model in one whose forward takes the "
                "samples stacked in one tensor, filled up to one size, and makes the list of them, "
                "or say in Batch(batch_dims=...) which dimension counts them"
            )
        return


def default_loss(output: Any, target: Any) -> Tensor:
    """The output's own loss, or a mean over its floating tensors so that backward has a start."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = [t for t in tensors_in(output) if t.requires_grad]
    if not leaves:
        raise InputError("the model's output holds no tensor that depends on a parameter")
    # Sums, as the mean of no elements is not a number.
    return torch.stack([t.float().sum() / max(t.numel(), 1) for t in leaves]).mean()


def workload_of(
    model: nn.Module | Workload, example_inputs: Any, loss: Callable[[Any, Any], Tensor] | None
) -> tuple[Workload, int]:
    """What to measure, and how many samples a rank feeds where the user does not say."""
    if isinstance(model, Workload):
        return located(with_shapes(model)), WORKLOAD_SAMPLES
    if not isinstance(model, nn.Module):
        raise InputError(
            f"auto_parallelize got {type(model).__name__} as model, expected a torch.nn.Module or "
            "a meshwright.Workload"
        )
    example = example_batch(model, example_inputs)
    return from_model(model, example, loss), example.size
