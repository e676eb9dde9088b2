"""What this executor runs, as data: plans are made within it, and the rest is refused by name."""

from ..planner.schema.capability import Capability

# A unit takes all ranks or a part of them that lie together, keeps, recomputes or offloads its
# feature maps (offload where the device has memory of its own), and exchanges its gradients in
# buckets, or in slices by priority; by priority it can also shard them among ranks, leave some of
# them for later, apply and free them in backward, or add them up on each host first. Hosts can
# train apart.
CAPABILITY = Capability(
    styles=("none", "column", "row", "pair"),
    memory=("keep", "recompute", "offload"),
    exchange=("dense", "sharded", "fully_sharded", "dropped", "topk", "int8", "low_rank"),
    idle_positions=True,
    branches=True,
    early_release=True,
    micro_batches=True,
    priority=True,
    in_buckets=("dense",),
    feedback=("residual", "in_place", "mirror", "host_mirror"),
    wire=("exact", "bf16"),
    idle_exchange=("dense", "sharded"),
    idle_release=False,
    by_host=True,
    local_steps=True,
)
