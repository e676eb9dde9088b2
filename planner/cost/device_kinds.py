"""Devices of one cluster that compute at different speeds.

A profile is measured on one device. Of nodes whose devices are quicker or slower it may hold times
of their own (``ModelProfile.node_times``); of others a cluster may say how fast they are relative
to the profile's (``Device.relative_speed``). Positions whose devices take the same form a *kind*.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..schema.cluster import Cluster, Device, Node
from ..schema.errors import InputError
from ..schema.profile import (
    CODING_SECONDS,
    CompressionRate,
    ModelProfile,
    NodeTimes,
    ShareProfile,
    UnitProfile,
    UnitTimes,
    UpdateRate,
)


class DeviceKind(NamedTuple):
    """Positions whose devices compute alike, and the profile of the model there."""

    profile: ModelProfile
    positions: tuple[int, ...]


def device_kinds(
    profile: ModelProfile, cluster: Cluster, placement: Sequence[int]
) -> tuple[DeviceKind, ...]:
    """The kinds of a cluster's devices, in the order of their first positions."""
    nodes, devices, node_of = cluster.nodes, cluster.devices, cluster.node_of_rank
    measured = _measured_nodes(profile)
    found: dict[tuple[int | None, float], list[int]] = {}
    for position, rank in enumerate(placement):
        times = measured.get(nodes[node_of[rank]].name)
        # What was measured says more than a ratio.
        speed = devices[rank].relative_speed if times is None else 1.0
        found.setdefault((times, speed), []).append(position)
    return tuple(
        DeviceKind(_profile_of(profile, *key), tuple(positions)) for key, positions in found.items()
    )


def slowest_node(profile: ModelProfile, cluster: Cluster) -> int:
    """The number of the node whose devices take longest for the same samples; of equal ones the
    first."""
    kinds = device_kinds(profile, cluster, range(cluster.world_size))
    batch = profile.batches[-1]

    def taken_s(kind: DeviceKind) -> float:
        units = kind.profile.units
        return sum(unit.whole.forward(batch) + unit.whole.backward(batch) for unit in units)

    # Of kinds that are alike the first: they are in the order of their first positions.
    return cluster.node_of_rank[max(kinds, key=taken_s).positions[0]]


def of_node(profile: ModelProfile, node: str) -> ModelProfile:
    """The profile as it is on the node of that name, for clusters whose nodes are all like it."""
    return _profile_of(profile, _measured_nodes(profile).get(node), 1.0)


def _measured_nodes(profile: ModelProfile) -> dict[str, int]:
    """Which of the profile's ``node_times`` are of a node, by its name."""
    return {node: i for i, times in enumerate(profile.node_times) for node in times.nodes}


def _profile_of(profile: ModelProfile, times: int | None, speed: float) -> ModelProfile:
    if times is not None:
        return with_times(profile, profile.node_times[times])
    own = msgspec.structs.replace(profile, node_times=()) if profile.node_times else profile
    return slowed(own, 1.0 / speed)


def with_times(profile: ModelProfile, times: NodeTimes) -> ModelProfile:
    """The profile as it is on other nodes."""
    units = (
        msgspec.structs.replace(
            unit,
            shares=there.shares,
            host_forward_s=there.host_forward_s,
            host_backward_s=there.host_backward_s,
        )
        for unit, there in zip(profile.units, times.units, strict=True)
    )
    return msgspec.structs.replace(
        profile, units=tuple(units), device=times.device, step=times.step, updates=times.updates,
        compression=times.compression, node_times=(),
    )  # fmt: skip


def times_of(profile: ModelProfile, nodes: Sequence[str]) -> NodeTimes:
    """What a profile says of the nodes that it was measured on."""
    return NodeTimes(
        nodes=tuple(nodes),
        device=profile.device,
        units=tuple(
            UnitTimes(
                name=u.name,
                shares=u.shares,
                host_forward_s=u.host_forward_s,
                host_backward_s=u.host_backward_s,
            )
            for u in profile.units
        ),
        step=profile.step,
        updates=profile.updates,
        compression=profile.compression,
    )


def with_profiles(
    profile: ModelProfile, others: Mapping[str, ModelProfile], cluster: Cluster
) -> ModelProfile:
    """The profile with the times of ``others``, each measured on the cluster's node of that name.
    Raises ``InputError`` for a name that the cluster does not have, and for another model."""
    check_names(others, cluster, "profile")
    for node, other in others.items():
        ours, theirs = ([u.name for u in each.units] for each in (profile, other))
        if profile.model != other.model or ours != theirs:
            raise InputError(
                f"the profile of node {node!r} is of {other.target} ({other.model}) and the other "
                f"of {profile.target} ({profile.model}): measure the same model on both"
            )
        if (profile.dtype, profile.precision) != (other.dtype, other.precision):
            words = [f"{p.dtype}, {p.precision or 'as built'}" for p in (other, profile)]
            raise InputError(
                f"the profile of node {node!r} was made with precision {words[0]}, and the other "
                f"with {words[1]}: measure both alike (--precision, precision)"
            )
    kept = [
        msgspec.structs.replace(times, nodes=left)
        for times in profile.node_times
        if (left := tuple(node for node in times.nodes if node not in others))
    ]
    new = [times_of(other, (node,)) for node, other in others.items()]
    return msgspec.structs.replace(profile, node_times=(*kept, *new))


def with_relative_speeds(cluster: Cluster, speeds: Mapping[str, float]) -> Cluster:
    """The cluster with the speed of each named node's devices, relative to the device that the
    profile is measured on. Raises ``InputError`` for a name that it does not have."""
    check_names(speeds, cluster, "speed")
    nodes = [_at_speed(n, speeds[n.name]) if n.name in speeds else n for n in cluster.nodes]
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))


def _at_speed(node: Node, speed: float) -> Node:
    def device(one: Device) -> Device:
        return msgspec.structs.replace(one, relative_speed=speed)

    return msgspec.structs.replace(node, devices=tuple(map(device, node.devices)))


def check_names(given: Mapping[str, object], cluster: Cluster, what: str) -> None:
    """Raises ``InputError`` where something is given of a node that the cluster does not have."""
    known = [node.name for node in cluster.nodes]
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        raise InputError(
            f"there is a {what} of node {wrong!r}, which cluster {cluster.name!r} does not have: "
            f"choose from {', '.join(known)}"
        )


def slowed(profile: ModelProfile, times: float, *, hosts: bool = False) -> ModelProfile:
    """The profile of devices that all take so many times as long to compute; and, where ``hosts``
    says so, of whose hosts issue their work as much more slowly."""
    if times == 1.0:
        return profile
    issuing = times if hosts else 1.0

    def of_unit(one: UnitProfile | UnitTimes) -> dict[str, Any]:
        return {
            "shares": _slowed_shares(one.shares, times),
            "host_forward_s": issuing * one.host_forward_s,
            "host_backward_s": issuing * one.host_backward_s,
        }

    def unit(one: UnitProfile) -> UnitProfile:
        return msgspec.structs.replace(one, **of_unit(one))

    def elsewhere(one: NodeTimes) -> NodeTimes:
        units = (msgspec.structs.replace(u, **of_unit(u)) for u in one.units)
        return msgspec.structs.replace(
            one,
            units=tuple(units),
            step=one.step and one.step.scaled(times),
            updates=_slowed_updates(one.updates, times, issuing),
            compression=_slowed_compression(one.compression, times),
        )

    return msgspec.structs.replace(
        profile,
        units=tuple(map(unit, profile.units)),
        step=profile.step and profile.step.scaled(times),
        updates=_slowed_updates(profile.updates, times, issuing),
        compression=_slowed_compression(profile.compression, times),
        node_times=tuple(map(elsewhere, profile.node_times)),
    )


def _slowed_shares(shares: tuple[ShareProfile, ...], times: float) -> tuple[ShareProfile, ...]:
    return tuple(
        msgspec.structs.replace(
            one, forward=one.forward.scaled(times), backward=one.backward.scaled(times)
        )
        for one in shares
    )


def _slowed_updates(
    rates: tuple[UpdateRate, ...], times: float, issuing: float
) -> tuple[UpdateRate, ...]:
    return tuple(
        msgspec.structs.replace(
            r, seconds_per_byte=times * r.seconds_per_byte, host_s=issuing * r.host_s
        )
        for r in rates
    )


def _slowed_compression(
    rates: tuple[CompressionRate, ...], times: float
) -> tuple[CompressionRate, ...]:
    return tuple(
        msgspec.structs.replace(r, **{name: times * getattr(r, name) for name in CODING_SECONDS})
        for r in rates
    )
