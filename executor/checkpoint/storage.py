"""How a checkpoint is written and read through torch.distributed.checkpoint: its planning of who
writes and reads what, with files of our own.

Its own files are not used, as their index is a pickle, which can make whoever reads it run
anything.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ...planner.schema.errors import InputError, MeshwrightError, RunError
from .boxes import TensorBox
from .folder import discard, publish, write_synced, writing_folder
from .holdings import StateTensor
from .index import (
    INDEX,
    PLAN,
    CheckpointIndex,
    StoredChunk,
    StoredFile,
    StoredTensor,
    encode_index,
    makes_up,
    state_file,
    tensors_file,
)
from .safetensors import FilePlace, MappedFile, write_tensors
from .values import dtype_name, dtype_of

StateTensors = Mapping[str, StateTensor]
# What is saved is one entry to torch, which makes notes of each: 0.2 ms of the thread that trains.
_TENSORS = "tensors"


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself."""

    step: int
    world_size: int
    model: str
    plan: str
    decisions: str
    plan_document: bytes


def save(
    folder: Path,
    description: Description,
    rank: int,
    tensors: StateTensors,
    state: bytes | Exception,
    group: dist.ProcessGroup | None,
) -> None:
    """Writes a checkpoint into ``folder``: it is there, whole and on disk, when this returns.
    Collective over ``group`` (none: this process by itself), whose ranks all raise ``RunError``
    where one fails, and where one has an error in place of ``state``."""
    with _in_words():
        dcp_save(
            {_TENSORS: tensors},
            storage_writer=_Writer(folder, description, rank, state),
            planner=_SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


def load(
    checkpoint: Path, index: CheckpointIndex, wanted: StateTensors, group: dist.ProcessGroup | None
) -> None:
    """Reads the boxes of the ``wanted`` tensors into their memory, however they were divided when
    they were written. Collective over ``group``, as ``save``."""
    with _in_words():
        dcp_load(
            {_TENSORS: wanted},
            storage_reader=_Reader(checkpoint, index),
            planner=_LoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, MeshwrightError):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def _in_words() -> Iterator[None]:
    """Says in a sentence why it failed, and on which rank."""
    try:
        yield
    except CheckpointException as error:  # no ``Exception`` to Python
        rank, (cause, _) = min(error.failures.items())
        raise RunError(f"rank {rank}: {_words(cause)}") from cause


# -- writing ---------------------------------------------------------------------------------------


class _SavePlanner(SavePlanner):
    """Each rank writes the boxes that it is given; between them they make up every tensor."""

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._tensors: StateTensors = state_dict[_TENSORS]
        self._memory: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self._tensors.items():
            properties = TensorProperties(dtype=tensor.dtype)
            for box, memory in tensor.boxes:
                index = MetadataIndex(name, box.offsets)
                self._memory[index] = memory
                data = TensorWriteData(_chunk(box), properties, torch.Size(tensor.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        found: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None, "only tensors are planned"
            entry = found.setdefault(
                item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
            )
            entry.chunks.append(data.chunk)
        for name, entry in found.items():
            written = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if not makes_up(name, written, entry.size.numel()):
                raise RunError(
                    f"the ranks would write {written} elements of {name!r}, which has "
                    f"{entry.size.numel()}: their models or optimizers are not in the same state"
                )
        return all_plans, Metadata(found)  # type: ignore[arg-type]  # a dict of one of its types

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._memory[write_item.index]


class _Writer(StorageWriter):
    """One file of tensors and one of small state for each rank, in a folder that gets its name when
    all of them are on disk."""

    def __init__(
        self, folder: Path, description: Description, rank: int, state: bytes | Exception
    ) -> None:
        self._folder, self._rank, self._state = folder, rank, state
        self._description = description
        self._writing = writing_folder(folder, description.step)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(self._state, Exception):
            raise self._state
        if is_coordinator:
            discard(self._folder, self._description.step)
            self._writing.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[_chunk_name(item.index)] = data
        name = tensors_file(self._rank)
        written = write_tensors(self._writing / name, tensors)
        results = [_written(name, written.bytes, written.sha256)]
        for item in plan.items:
            start, stop = written.places[_chunk_name(item.index)]
            results.append(WriteResult(item.index, stop - start, (name, start, stop)))
        assert isinstance(self._state, bytes)
        results.append(self._small(state_file(self._rank), self._state))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _small(self, name: str, data: bytes) -> WriteResult:
        write_synced(self._writing / name, data)
        return _written(name, len(data), hashlib.sha256(data).hexdigest())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        plan = self._small(PLAN, self._description.plan_document)
        index = _index(self._description, metadata, [*(r for rs in results for r in rs), plan])
        # On a folder of its own a host's files would be missing here.
        for file in index.files:
            path = self._writing / file.name
            if not path.exists() or path.stat().st_size != file.bytes:
                raise RunError(f"{path} is not seen by rank 0: name a folder that all hosts share")
        write_synced(self._writing / INDEX, encode_index(index))
        publish(self._folder, self._description.step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def storage_meta(self) -> StorageMeta | None:
        return None


def _chunk(box: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _chunk_name(index: MetadataIndex) -> str:
    """The name of a box in a rank's file: that of its tensor, and where it begins."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _written(name: str, size: int, sha256: str) -> WriteResult:
    return WriteResult(MetadataIndex(name), size, StoredFile(name=name, bytes=size, sha256=sha256))


def _index(
    description: Description, metadata: Metadata, results: list[WriteResult]
) -> CheckpointIndex:
    files = [r.storage_data for r in results if isinstance(r.storage_data, StoredFile)]
    numbers = {file.name: number for number, file in enumerate(files)}
    places = {r.index: r.storage_data for r in results if isinstance(r.storage_data, tuple)}
    tensors = []
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            file, start, stop = places[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                StoredChunk(
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                    file=numbers[file],
                    start=start,
                    stop=stop,
                )
            )
        dtype = dtype_name(entry.properties.dtype)
        tensors.append(
            StoredTensor(name=name, dtype=dtype, shape=tuple(entry.size), chunks=tuple(chunks))
        )
    return CheckpointIndex(
        step=description.step,
        world_size=description.world_size,
        model=description.model,
        plan=description.plan,
        decisions=description.decisions,
        files=tuple(files),
        tensors=tuple(tensors),
    )


# -- reading ---------------------------------------------------------------------------------------


class _LoadPlanner(LoadPlanner):
    """Fills the boxes that a rank asks for from those that were written."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._wanted: StateTensors = state_dict[_TENSORS]
        self._metadata = metadata
        self._memory: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, tensor in self._wanted.items():
            entry = self._metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            for box, memory in tensor.boxes:
                self._memory[MetadataIndex(name, box.offsets)] = memory
            chunks = [_chunk(box) for box, _ in tensor.boxes]
            found = create_read_items_for_chunk_list(name, entry, chunks)
            wanted = sum(memory.numel() for _, memory in tensor.boxes)
            if sum(prod(item.lengths) for item in found) != wanted:
                raise InputError(f"the checkpoint has no more than a part of {name!r}")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("nothing is stored but tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        memory = self._memory[read_item.dest_index]
        return _narrowed(memory, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class _Reader(StorageReader):
    """Reads what ``_Writer`` has written."""

    def __init__(self, checkpoint: Path, index: CheckpointIndex) -> None:
        self._index, self._stored = index, StoredTensors(checkpoint, index)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                tensor.name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(tensor.dtype)),
                    torch.Size(tensor.shape),
                    [_chunk(TensorBox(c.offsets, c.sizes)) for c in tensor.chunks],
                )
                for tensor in self._index.tensors
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with torch.no_grad():
            for item in plan.items:
                index = item.storage_index
                source = self._stored.chunk(index.fqn, tuple(index.offset or ()))
                source = _narrowed(source, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).copy_(source)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class StoredTensors:
    """The tensors of a checkpoint, whose files are read when something is asked of them."""

    def __init__(self, checkpoint: Path, index: CheckpointIndex) -> None:
        self._checkpoint, self._index = checkpoint, index
        self._files: dict[int, MappedFile] = {}
        self._chunks = {
            (tensor.name, chunk.offsets): (dtype_of(tensor.dtype), chunk)
            for tensor in index.tensors
            for chunk in tensor.chunks
        }

    def chunk(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        """A stored box, in the memory of its file."""
        dtype, chunk = self._chunks[name, offsets]
        if chunk.file not in self._files:
            path = self._checkpoint / self._index.files[chunk.file].name
            self._files[chunk.file] = MappedFile(path)
        return self._files[chunk.file].tensor(
            FilePlace(chunk.start, chunk.stop), dtype, chunk.sizes
        )

    def whole(self, tensor: StoredTensor) -> Tensor:
        """A tensor put together."""
        whole = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype))
        for chunk in tensor.chunks:
            _narrowed(whole, chunk.offsets, chunk.sizes).copy_(
                self.chunk(tensor.name, chunk.offsets)
            )
        return whole


def _narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
