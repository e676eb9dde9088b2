"""ModelProfile: what was measured of a model, as units and the edges between them."""

from collections.abc import Mapping
from math import prod
from typing import Literal

from .curve import ZERO, Curve
from .layout import Style
from .precision import Precision
from .record import Bytes, BytesReal, Count, Document, Index, Record, Seconds, Share, Spread

Origin = Literal["measured", "estimated", "table"]
"""Where times come from: measured here, counted for a catalogued device, or published."""
UnitKind = Literal[
    "input",
    "output",
    "glue",
    "linear",
    "conv",
    "embedding",
    "attention",
    "mlp",
    "experts",
    "norm",
    "recurrent",
    "other",
]
# Kinds that always have the layout (W, 1): the model's ends and its own code between units, which
# see each rank's own samples whatever is planned.
FIXED_KINDS = frozenset({"input", "output", "glue"})
LossyExchange = Literal["dropped", "topk", "int8", "low_rank"]
"""Exchanges in which a part of the gradient waits for a later step."""
CodedExchange = Literal[LossyExchange, "bf16"]
"""Those, and the wire formats: what costs time before a gradient is sent and when it has come."""


class ParameterProfile(Record, frozen=True, kw_only=True):
    """One parameter. ``shared`` is its canonical name: equal for all names of a tied parameter.
    ``reached`` says whether a backward computes a gradient of it: of a model for text and images
    that gets text only, much is never reached."""

    name: str
    shared: str
    shape: tuple[Index, ...]
    bytes: Bytes
    trainable: bool = True
    reached: bool = True

    @property
    def is_half(self) -> bool:
        """Whether its elements have 16 bits: steps of sharded exchanges keep main weights of it."""
        return self.bytes == 2 * prod(self.shape)


class ShareProfile(Record, frozen=True, kw_only=True):
    """What one member of a group of ``degree`` costs under ``style``, by samples of its group.

    ``forward`` and ``backward`` in seconds; ``saved`` bytes of feature maps kept for backward;
    ``gradient`` the largest bytes of feature-map gradients alive at once inside the unit;
    ``workspace`` the largest bytes of other temporaries. ``parameter_bytes`` is the member's shard.
    ``new_grad`` are new weight gradients that are alive when most is, should those that are
    complete be kept elsewhere; ``never_together`` what is then not there yet of them or not there
    any more of what was saved, beyond what comes on top. ``partial_sums`` are bytes for each sample
    of the group that members add up among them in forward; zero where none are, and where it was
    not measured, where they are taken to be the unit's output.
    """

    style: Style
    degree: Count
    forward: Curve
    backward: Curve
    saved: Curve
    gradient: Curve
    workspace: Curve
    parameter_bytes: Bytes
    new_grad: Curve = ZERO
    never_together: Curve = ZERO
    partial_sums: Bytes = 0


class SplitProfile(Record, frozen=True, kw_only=True):
    """A way in which a unit's parameters can be divided.

    ``parts`` is how many pieces cannot be cut further (output features, attention heads);
    ``uneven`` says whether degrees that do not divide ``parts`` work too. ``features`` is the
    length of the dimension by which the input (``row``) or output (``column``) is sliced.
    ``sharded`` has the dimension for each shared parameter name: parameters tied between units can
    be divided only if all uses cut the same dimension.
    """

    style: Style
    parts: Count
    uneven: bool
    features: Count
    sharded: tuple[tuple[str, Index], ...]


class FidelityProfile(Record, frozen=True, kw_only=True):
    """What a lossy exchange of a unit's gradient keeps.

    ``ratios`` are the shares of the elements that were sent when it was measured, rising, and
    ``kept`` the shares of the gradient's energy (squared L2 norm) that this sent; an exchange may
    be planned at these ratios only.
    """

    exchange: LossyExchange
    ratios: tuple[Share, ...]
    kept: tuple[Share, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.ratios) != len(self.kept) or not self.ratios:
            raise ValueError(
                f"fidelity needs as many kept as ratios, got {len(self.kept)} and "
                f"{len(self.ratios)}"
            )
        # A ratio of zero would send nothing, and what is kept would never come.
        if min(self.ratios) <= 0 or sorted(set(self.ratios)) != list(self.ratios):
            raise ValueError(f"ratios must be positive and rising, got {self.ratios}")


def check_batch_dims(unit: str, inputs: tuple[int, ...], dims: tuple[int, ...] | None) -> None:
    """Raises ``ValueError`` unless each of a unit's batched inputs has its dimension."""
    if dims is not None and len(dims) != len(inputs):
        raise ValueError(
            f"unit {unit!r} has {len(dims)} batch_dims for {len(inputs)} batched_inputs"
        )


class UnitProfile(Record, frozen=True, kw_only=True):
    """The smallest piece of a model that gets its own decision.

    ``modules`` are the fully qualified names of its submodules in order of execution; empty for
    the model's input and output and for the code between units (``glue``). ``shares`` holds the
    measurements, the undivided unit (style ``none``, degree 1) first. ``state_bytes`` are buffers.
    ``batch_statistics`` marks units whose result depends on which samples are together;
    ``statistics_bytes`` is what ``global`` statistics all-reduce, each way. ``batched_inputs`` are
    the leaves of the flattened ``(args, kwargs)`` at entry that hold samples, ``batch_dims`` the
    dimension of each that counts them (None: dimension 0 of all, and of all that the unit leaves).
    Of ``@input`` both are empty where the first tensor tells the samples in its dimension 0.
    ``output_kept`` says whether somebody saves its output for backward (a shortcut's sum does not),
    ``input_kept`` how many bytes of its inputs, for each sample, it alone saves, ``input_saved``
    how many it saves, whoever else does (unknown: all that enters it).
    ``stays_whole`` says why it is not made of finer units or not divided, and what to change in the
    model; it is empty where it is as fine as its modules.
    ``fidelity`` is what lossy exchanges keep (none measured: none may be used) and
    ``gradient_energy`` the mean squared L2 norm of the unit's gradient, its weight among the units.
    ``host_forward_s`` and ``host_backward_s`` are what a GPU's host takes to issue its operators,
    at any batch (zero on CPUs), and ``saved_storages`` how many it saves for backward.
    """

    name: str
    kind: UnitKind
    modules: tuple[str, ...] = ()
    batched_inputs: tuple[Index, ...] = ()
    batch_dims: tuple[Index, ...] | None = None
    parameters: tuple[ParameterProfile, ...] = ()
    state_bytes: Bytes = 0
    batch_statistics: bool = False
    statistics_bytes: Bytes = 0
    splits: tuple[SplitProfile, ...] = ()
    shares: tuple[ShareProfile, ...]
    output_kept: bool = True
    input_kept: BytesReal = 0.0
    input_saved: BytesReal | None = None
    stays_whole: str = ""
    fidelity: tuple[FidelityProfile, ...] = ()
    gradient_energy: BytesReal = 0.0
    host_forward_s: Seconds = 0.0
    host_backward_s: Seconds = 0.0
    saved_storages: Index = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # ``whole`` reads the first, and ``cost.compute.share_of`` measures all others by it.
        if not self.shares or self.shares[0].style != "none" or self.shares[0].degree != 1:
            raise ValueError(f"shares of unit {self.name!r} must begin with the undivided unit")
        kinds = [(share.style, share.degree) for share in self.shares]
        if len(set(kinds)) != len(kinds):
            style, degree = next(kind for kind in kinds if kinds.count(kind) > 1)
            raise ValueError(f"unit {self.name!r} has two shares {style} of degree {degree}")
        check_batch_dims(self.name, self.batched_inputs, self.batch_dims)

    @property
    def whole(self) -> ShareProfile:
        """The measurements of the undivided unit."""
        return self.shares[0]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones included."""
        return sum(p.bytes for p in self.parameters)

    @property
    def fixed(self) -> bool:
        """Whether the layout is (W, 1) whatever is planned."""
        return self.kind in FIXED_KINDS

    def split(self, style: Style) -> SplitProfile | None:
        """The split of that style, if the unit has it."""
        return next((s for s in self.splits if s.style == style), None)

    def kept(self, exchange: str, ratio: float) -> float | None:
        """The share of the gradient's energy that a lossy exchange sends, None if not measured."""
        # At the measured ratios only: between them nothing is known.
        for curve in self.fidelity:
            if curve.exchange == exchange and ratio in curve.ratios:
                return curve.kept[curve.ratios.index(ratio)]
        return None


class EdgeProfile(Record, frozen=True, kw_only=True):
    """The tensors that flow from one unit to another.

    ``bytes_per_sample`` of those that have a batch dimension; ``gradient_bytes_per_sample`` the
    part of it that comes back in backward (none for token numbers and masks). ``features`` is the
    length of the dimension that a ``column`` source slices, or that a ``row`` target needs sliced.
    Edges of one source with the same number in ``tensors`` carry the same tensors, so that units
    which need them alike get them together (``cost.redistribution``).
    """

    source: str
    target: str
    bytes_per_sample: BytesReal
    gradient_bytes_per_sample: BytesReal
    features: Count = 1
    tensors: Index = 0


class PieceProfile(Record, frozen=True, kw_only=True):
    """Modules of the model called one after another in one stretch of its forward, which a segment
    can be made of: a unit's, or one that contains units.

    ``first`` and ``last`` are the units, glue among them, of which all lies in this stretch (as do
    those between them); both empty where there is none. ``follows`` names the pieces (each by its
    first module) whose output, and nothing else, enters this one, with nothing done in between.
    ``opens`` says whether a segment may begin with it: not where it changes its input in place.
    """

    modules: tuple[str, ...]
    first: str = ""
    last: str = ""
    follows: tuple[str, ...] = ()
    opens: bool = True


class UpdateRate(Record, frozen=True, kw_only=True):
    """Seconds that an optimizer takes for each byte of parameters, the freeing of their gradients
    included; ``sharded``: where exchanges are sharded, with main weights of what has 16 bits.
    ``host_s`` is what a GPU's host takes for each parameter (zero on CPUs)."""

    optimizer: str
    seconds_per_byte: Seconds
    sharded: bool = False
    host_s: Seconds = 0.0


class CompressionRate(Record, frozen=True, kw_only=True):
    """Seconds that an exchange or a wire format takes for each byte of gradients: to choose, round
    and pack what it sends, and to make gradients of what has come: once (``received``), and for
    each peer where all get what each has sent (``gathered``). ``ratio`` is the share of the
    elements that was sent when it was measured (none: it takes as long at any). The ``fixed``
    seconds come on top of each of these, on GPUs: of small gradients kernels, and the wait for how
    many elements were chosen, take as long as of larger ones. They count for each parameter,
    ``int8`` for each slice, ``bf16`` for each message."""

    exchange: CodedExchange
    ratio: Share | None = None
    seconds_per_byte: Seconds
    received_seconds_per_byte: Seconds = 0.0
    gathered_seconds_per_byte: Seconds = 0.0
    fixed_s: Seconds = 0.0
    received_fixed_s: Seconds = 0.0
    gathered_fixed_s: Seconds = 0.0


CODING_FIXED = {
    "seconds_per_byte": "fixed_s",
    "received_seconds_per_byte": "received_fixed_s",
    "gathered_seconds_per_byte": "gathered_fixed_s",
}
"""Each of the rates of a ``CompressionRate``, and what is fixed beside it."""
CODING_SECONDS = (*CODING_FIXED, *CODING_FIXED.values())


class UnitTimes(Record, frozen=True, kw_only=True):
    """What the unit of that ``name`` takes on other nodes: its shares as measured there, and what
    hosts take to issue it."""

    name: str
    shares: tuple[ShareProfile, ...]
    host_forward_s: Seconds = 0.0
    host_backward_s: Seconds = 0.0


class NodeTimes(Record, frozen=True, kw_only=True):
    """What a model takes on other ``nodes`` of a cluster, whose devices are quicker or slower than
    the profile's own: all ``units`` in their order, and rates as in ``ModelProfile``. Their times
    are used; memory stays that of the profile's own device."""

    nodes: tuple[str, ...]
    device: str
    units: tuple[UnitTimes, ...]
    step: Curve | None = None
    updates: tuple[UpdateRate, ...] = ()
    compression: tuple[CompressionRate, ...] = ()


class ModelProfile(Document, frozen=True, kw_only=True, tag="ModelProfile"):
    """A model's units as a directed acyclic graph, measured on one device.

    ``target`` is how the model was named (``vgg16``, ``file.py:factory``); ``model`` the
    fingerprint of its structure (parameter names and shapes, unit names). ``batches`` are the batch
    sizes measured. ``step`` is the measured forward plus backward of the whole model, with
    which the sum of units is compared, and ``spread`` how far repetitions of it lay apart.
    ``pieces`` are what segments that are recomputed can be
    made of. ``dtype`` is that of the parameters, and ``precision`` how the model computed (none:
    as it was built). ``node_times`` are of nodes whose devices are quicker or slower; what it does
    not name is like the profile's own device. ``calibrated`` says what was corrected since, by
    runs.
    """

    schema_version: int = 2
    target: str
    model: str
    device: str
    device_type: str
    dtype: str
    precision: Precision | None = None
    software: tuple[tuple[str, str], ...] = ()
    batches: tuple[Count, ...]
    units: tuple[UnitProfile, ...]
    edges: tuple[EdgeProfile, ...]
    pieces: tuple[PieceProfile, ...] = ()
    step: Curve | None = None
    spread: Spread = 0.0
    updates: tuple[UpdateRate, ...] = ()
    compression: tuple[CompressionRate, ...] = ()
    origin: Origin = "measured"
    node_times: tuple[NodeTimes, ...] = ()
    calibrated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batches:
            raise ValueError("batches is empty: name the batch sizes that were measured")
        names = [u.name for u in self.units]
        # Edges, pieces, pins and plans name units: a second one of a name could not be meant.
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"unit {twice!r} is listed twice")
        order = {n: i for i, n in enumerate(names)}
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in order:
                    raise ValueError(f"an edge names unit {end!r}, which is not listed")
            # Both step formulas and the memory timeline walk units in the order of forward.
            if order[edge.source] >= order[edge.target]:
                raise ValueError(
                    f"edge {edge.source!r} to {edge.target!r} goes back: keep forward order"
                )
        for piece in self.pieces:
            self._check_piece(piece, order)
        # The model's ends have the layout (W, 1): what can be decided lies between them.
        if not names or self.units[0].kind != "input" or self.units[-1].kind != "output":
            raise ValueError("units must begin with the model's input and end with its output")
        for times in self.node_times:
            if [u.name for u in times.units] != names:
                where = ", ".join(times.nodes)
                raise ValueError(f"node_times of {where} are of other units than the profile's")
        listed = [node for times in self.node_times for node in times.nodes]
        if len(set(listed)) != len(listed):
            twice = next(n for n in listed if listed.count(n) > 1)
            raise ValueError(f"node_times lists node {twice!r} twice")

    def _check_piece(self, piece: PieceProfile, order: Mapping[str, int]) -> None:
        """Raises ``ValueError`` for a piece of no modules, or of units that are not listed so."""
        if not piece.modules:
            raise ValueError("a piece names no modules")
        for end in (piece.first, piece.last):
            if end and end not in order:
                raise ValueError(f"a piece names unit {end!r}, which is not listed")
        if piece.first and piece.last and order[piece.first] > order[piece.last]:
            raise ValueError(
                f"piece {piece.modules[0]!r} goes from {piece.first!r} back to {piece.last!r}: "
                "keep forward order"
            )

    def unit(self, name: str) -> UnitProfile:
        """The unit of that name."""
        return next(u for u in self.units if u.name == name)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, each tied one counted once."""
        # By canonical name: a tied parameter has several names and one memory.
        once = {p.shared: p.bytes for u in self.units for p in u.parameters}
        return sum(once.values())

    @property
    def issued_s(self) -> float:
        """What a GPU's host takes to issue a forward and a backward; zero on CPUs."""
        return sum(unit.host_forward_s + unit.host_backward_s for unit in self.units)

    def update_seconds_per_byte(self, optimizer: str, *, sharded: bool = False) -> float:
        """The measured update rate, Adam's and AdamW's for each other where one was not measured;
        zero where none was."""
        rate = self._update_rate(optimizer, sharded=sharded)
        return rate.seconds_per_byte if rate else 0.0

    def update_host_s(self, optimizer: str) -> float:
        """What a GPU's host takes to issue the update of one parameter, likewise."""
        rate = self._update_rate(optimizer)
        return rate.host_s if rate else 0.0

    def _update_rate(self, optimizer: str, *, sharded: bool = False) -> UpdateRate | None:
        rates = {r.optimizer: r for r in self.updates if not r.sharded}
        if sharded:
            rates |= {r.optimizer: r for r in self.updates if r.sharded}
        # Both do the same work for each element.
        alike = {"adam": "adamw", "adamw": "adam"}.get(optimizer, optimizer)
        return rates.get(optimizer, rates.get(alike))

    def compression_rate(self, exchange: str, ratio: float = 1.0) -> CompressionRate | None:
        """The measured rate of a lossy exchange or a wire format, of several that of the nearest
        ratio; None where it was not measured."""
        rates = (r for r in self.compression if r.exchange == exchange)
        return min(
            rates,
            key=lambda r: 0.0 if r.ratio is None else abs(r.ratio - ratio),
            default=None,
        )
