"""A profile's units and edges by their numbers, and who owns and shares which parameters."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ..schema.options import Option, tied_units
from ..schema.profile import ModelProfile, ParameterProfile
from .ownership import TensorPlacement, input_placement, output_placement
from .redistribution import SharedRedistribution, edge_redistribution, edge_tensors


class Structure:
    """What follows from the units and edges of a profile alone. Both go by their numbers."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile

    @cached_property
    def index(self) -> dict[str, int]:
        """Position in forward order by unit name."""
        return {u.name: i for i, u in enumerate(self.profile.units)}

    @cached_property
    def ends(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of each edge as indices of units."""
        return tuple((self.index[e.source], self.index[e.target]) for e in self.profile.edges)

    @cached_property
    def edges_into(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the edges that end at each unit."""
        return self._edges_at(1)

    @cached_property
    def edges_from(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the edges that begin at each unit."""
        return self._edges_at(0)

    def _edges_at(self, end: int) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.profile.units]
        for e, ends in enumerate(self.ends):
            found[ends[end]].append(e)
        return tuple(tuple(edges) for edges in found)

    @cached_property
    def same_tensors_before(self) -> tuple[tuple[int, ...], ...]:
        """For each edge those that carry the same tensors to units before its own (or to the same,
        listed before)."""
        same: dict[object, tuple[int, ...]] = {}
        found: list[tuple[int, ...]] = [()] * len(self.ends)
        for e in sorted(range(len(self.ends)), key=lambda e: (self.ends[e][1], e)):
            tensors = edge_tensors(self.profile.edges[e])
            found[e] = same.get(tensors, ())
            same[tensors] = (*found[e], e)
        return tuple(found)

    @cached_property
    def sharable(self) -> tuple[bool, ...]:
        """For each edge whether another carries the same tensors."""
        tensors = [edge_tensors(edge) for edge in self.profile.edges]
        times = Counter(tensors)
        return tuple(times[one] > 1 for one in tensors)

    @cached_property
    def kept_shares(self) -> tuple[float, ...]:
        """For each edge the share of its bytes that its target alone saves for backward."""
        entering = [
            sum(self.profile.edges[e].bytes_per_sample for e in edges) for edges in self.edges_into
        ]
        kept = [unit.input_kept for unit in self.profile.units]
        targets = (target for _, target in self.ends)
        return tuple(min(kept[k] / entering[k], 1.0) if entering[k] else 0.0 for k in targets)

    def kept_share(self, e: int, target: TensorPlacement) -> float:
        """Of the bytes that edge ``e`` brings to a divided unit those that its memory grows by, as
        a share; none of tensors that only it can have (``own_input_bytes`` counts these). What
        it alone would keep of them, were it whole, counts to the unit that made them."""
        degree = target.layout.degree
        if degree == 1 or not self.sharable[e]:
            return 0.0
        # Of all features of a group's samples its own samples are a part; of a slice all of them.
        return 1.0 - self.kept_shares[e] / (1 if target.form == "feature_shard" else degree)

    def redistributed_before(
        self, e: int, decisions: Sequence[Option] | Mapping[int, Option]
    ) -> bool:
        """Whether an earlier unit needs the tensors of edge ``e`` as its target does, so that they
        have moved already (see [Note: Shared redistributions] in cost/redistribution.py). Of the
        ``decisions`` those at the ends of such edges are enough."""
        earlier = self.same_tensors_before[e]
        if not earlier:
            return False

        def of(edge: int) -> SharedRedistribution:
            a, b = self.ends[edge]
            source, target = output_placement(*decisions[a][:2]), input_placement(*decisions[b][:2])
            return edge_redistribution(self.profile.edges[edge], source, target)

        mine = of(e)
        return any(of(other) == mine for other in earlier)

    @cached_property
    def entered_after(self) -> tuple[frozenset[int], ...]:
        """For each unit the units whose inputs cost more or less by its decision: those that take
        its output, and those that take the same tensors as it does and come later."""
        found: list[set[int]] = [set() for _ in self.profile.units]
        for e, (a, b) in enumerate(self.ends):
            found[a].add(b)
            for earlier in self.same_tensors_before[e]:
                found[self.ends[earlier][1]].add(b)
        return tuple(frozenset(units) for units in found)

    def sources_of(self, units: Iterable[int]) -> set[int]:
        """The units whose outputs some of these take."""
        return {self.ends[e][0] for k in units for e in self.edges_into[k]}

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each unit the last unit that its output goes to, itself where that is none."""
        targets = ([self.ends[e][1] for e in edges] for edges in self.edges_from)
        return tuple(max(found, default=k) for k, found in enumerate(targets))

    @cached_property
    def passing_bytes(self) -> tuple[float, ...]:
        """For each unit the bytes per sample of gradients of feature maps that are there when its
        backward ends: of all that was made before it and is used by it or after it."""
        found = [0.0] * len(self.profile.units)
        for a, edges in enumerate(self.edges_from):
            known = [(self.ends[e][1], self.profile.edges[e]) for e in edges]
            for k in range(a + 1, max((b for b, _ in known), default=a) + 1):
                found[k] += max(e.gradient_bytes_per_sample for b, e in known if b >= k)
        return tuple(found)

    @cached_property
    def owned(self) -> tuple[tuple[ParameterProfile, ...], ...]:
        """The parameters that count at each unit: a tied one at its first user only."""
        seen: set[str] = set()
        found = []
        for unit in self.profile.units:
            mine = {p.shared: p for p in unit.parameters if p.shared not in seen}
            seen |= mine.keys()
            found.append(tuple(mine.values()))
        return tuple(found)

    @cached_property
    def untied(self) -> tuple[tuple[ParameterProfile, ...], ...]:
        """Each unit's parameters that are trained and that no other unit uses."""
        users = Counter(n for u in self.profile.units for n in {p.shared for p in u.parameters})
        return tuple(
            tuple(p for p in own if p.trainable and users[p.shared] == 1) for own in self.owned
        )

    @cached_property
    def energy_shares(self) -> tuple[float, ...]:
        """The share of the whole gradient's energy in each unit: as it was measured, or where none
        was in proportion to the units' parameters."""
        energy = [u.gradient_energy for u in self.profile.units]
        if not any(energy):
            energy = [float(sum(p.bytes for p in own if p.trainable)) for own in self.owned]
        whole = max(sum(energy), 1e-300)  # all zero where nothing is trained
        return tuple(each / whole for each in energy)

    @cached_property
    def summed_bytes(self) -> tuple[tuple[float, float], ...]:
        """For each unit the bytes of tied parameters' gradients besides those that stand: of its
        own, and of others'."""
        users: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for k, unit in enumerate(self.profile.units):
            for name, size in {p.shared: p.bytes for p in unit.parameters if p.trainable}.items():
                users.setdefault(name, []).append(k)
                sizes[name] = size
        found = [[0.0, 0.0] for _ in self.profile.units]
        # Backward comes to the last user first. Its gradient stays until the first user's is ready;
        # then both are there beside their sum.
        for name, at in users.items():
            if len(at) > 1:
                found[at[0]][0] += 2.0 * sizes[name]
                for k in range(at[0] + 1, at[-1]):
                    found[k][1] += sizes[name]
        return tuple((own, others) for own, others in found)

    @cached_property
    def ties(self) -> tuple[tuple[int, ...], ...]:
        """For each unit the units that must share its layout, itself among them."""
        return tied_units(self.profile)
