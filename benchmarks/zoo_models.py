"""Small models of architectures that other packages define, made from their configurations with
random weights; nothing is downloaded."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from meshwright import Batch, Workload
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

# Sizes of a small model. All widths are equal, as many models add what several configurations size.
WIDTH, HEADS, LAYERS, SYMBOLS, LENGTH, PIXELS, PATCH = 64, 4, 2, 128, 16, 64, 16
HEAD_DIM, CLASSES = WIDTH // HEADS, 8
MOST_PARAMETERS = 30_000_000

# The heads by which a model of an architecture is chosen, the first that there is.
MAPPINGS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "PRETRAINING",
)

# By what a size is called, wherever it is in a configuration: first what never depends on another
# size, then what is small for every kind of model, then what other sizes may be parts of.
_COUNTS: dict[str, int] = {
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
            "decoder_layers", "num_encoder_layers", "num_decoder_layers", "depth",
            "decoder_num_hidden_layers", "encoder_num_hidden_layers", "num_hidden_groups",
            "decoder_num_layers", "encoder_num_layers", "n_encoder_layers", "num_blocks",
            "num_encoder_blocks_per_stage", "num_self_attends_per_block",
        ),
        LAYERS,
    ),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "text_vocab_size"), SYMBOLS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 4 * LENGTH),
    "num_labels": CLASSES,
    # What is longer pads each text, and torch's softmax has no gradient for rows of padding alone.
    "attention_window": LENGTH // 2,
    **dict.fromkeys(("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "width_coefficient", "depth_coefficient"), 1),
}  # fmt: skip
_WIDTHS: dict[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "hidden_dim",
            "d_embed", "emb_dim", "model_dim", "decoder_hidden_size", "encoder_hidden_size",
            "projection_dim", "output_dim", "word_embed_proj_dim", "rnn_hidden_size", "width",
            "encoder_embed_dim", "decoder_embed_dim", "attention_hidden_size", "out_hidden_size",
            "fpn_hidden_size", "mask_feature_size", "fusion_hidden_size", "neck_hidden_size",
            "conv_dim_out", "lru_width", "n_embed", "encoder_hidden_dim", "attention_dim",
            "decoder_hidden_dim",
        ),
        WIDTH,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner",
            "ffn_hidden_size", "d_inner", "decoder_intermediate_size", "mlp_dim",
            "dim_feedforward", "feed_forward_size", "moe_intermediate_size", "intermediate_dim",
            "shared_expert_intermediate_size", "ff_dim", "encoder_intermediate_size",
        ),
        2 * WIDTH,
    ),
    **dict.fromkeys(("image_size", "img_size"), PIXELS),
    "patch_size": PATCH,
}  # fmt: skip
_HEADS: dict[str, int] = {
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads", "decoder_num_attention_heads", "attention_heads", "nhead",
            "encoder_num_attention_heads", "num_encoder_attention_heads", "linear_num_value_heads",
            "num_decoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            "num_key_value_heads", "n_kv_heads", "num_kv_heads", "linear_num_key_heads",
            "multi_query_group_num", "decoder_num_key_value_heads",
        ),
        2,
    ),
    **dict.fromkeys(("d_kv", "attention_head_size", "kv_channels", "d_head"), HEAD_DIM),
}  # fmt: skip
_HEAD_DIM = {
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2 * HEAD_DIM),
    "rotary_dim": HEAD_DIM // 2,
}


class _Level(NamedTuple):
    """What is set in a configuration by name, and by what its other widths are divided."""

    sizes: Mapping[str, int]
    divisor: int = 1


# From small to large: what a configuration cannot have stays as its authors set it.
_LEVELS = (
    _Level({**_COUNTS, **_WIDTHS, **_HEADS, **_HEAD_DIM}),
    _Level({**_COUNTS, **_WIDTHS, **_HEADS}),
    # All widths in the proportions of the original, whatever they are called.
    _Level(_COUNTS, 8),
    _Level({**_COUNTS, **_WIDTHS}),
    _Level(_COUNTS, 4),
    _Level(_COUNTS),
)
# Whole numbers that are no widths.
_NO_WIDTHS = ("num_", "max_", "image_", "patch_", "n_", "window_", "sliding_", "stride", "hop_")
LEAST_WIDTH = 32


def architectures() -> dict[str, str]:
    """A class with a head for each of transformers' architectures (by ``model_type``) that takes
    text, images or sound; without a head where it has none of ``MAPPINGS``."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for name in (*MAPPINGS, None):
        mapping = f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES"
        for kind, classes in getattr(modeling_auto, mapping).items():
            found.setdefault(kind, classes if isinstance(classes, str) else classes[0])
    return found


def from_transformers(kind: str) -> Workload:
    """A small model of the architecture that trains on random inputs. Raises what the last try
    raised where none does."""
    import transformers

    cls = getattr(transformers, architectures()[kind])
    if kind in _FOUND:
        level, way = _FOUND[kind]
        model, config = _made(cls, level)
        return Workload(kind, model, list(inputs_of(model, config))[way], loss)
    error: Exception | None = None
    for level in _LEVELS:
        try:
            model, config = _made(cls, level)
            ways = list(inputs_of(model, config))
        except Exception as raised:  # whatever a configuration that fits nothing raises
            # What came of the smallest, and of its main input, tells most.
            error = error or raised
            continue
        for way, make_batch in enumerate(ways):
            try:
                try_training(Workload(kind, model, make_batch, loss))
            except Exception as raised:
                error = error or raised
            else:
                _FOUND[kind] = level, way
                return from_transformers(kind)
    assert error is not None
    raise error


# What makes a model of an architecture that trains: a level, and which of its inputs.
_FOUND: dict[str, tuple[_Level, int]] = {}


def _made(cls: Any, level: _Level) -> tuple[nn.Module, Any]:
    config = cls.config_class()
    shrink(config, level)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters: its configuration has sizes of other names")
    torch.manual_seed(0)
    return cls(config), config


def try_training(workload: Workload, *, keep: bool = False) -> None:
    """Forward and backward of two samples; gradients stay with ``keep``. Raises what the model
    raises."""
    batch = workload.make_batch(2)
    output = workload.model(*batch.args, **batch.kwargs)
    workload.loss(output, batch.target).backward()
    if not keep:
        workload.model.zero_grad()


def shrink(config: Any, level: _Level) -> None:
    """Makes a configuration, and those inside it, as small as ``level`` says."""
    specials = iter(range(SYMBOLS - 1, 0, -1))
    for inner in _inside(config):
        _shrink_one(inner, level, specials)


def _inside(config: Any) -> Iterator[Any]:
    from transformers import PretrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _inside(value)


def _shrink_one(config: Any, level: _Level, specials: Iterator[int]) -> None:
    sizes = level.sizes
    said = {held: sizes[name] for name, held in config.attribute_map.items() if name in sizes}
    for name, value in list(vars(config).items()):
        new = _smaller(name, value, sizes.get(name, said.get(name)), specials)
        if "hidden_size" in sizes and name in _STAGES and isinstance(value, list | tuple):
            new = type(value)(WIDTH for _ in value)
        if new is value and level.divisor > 1 and not name.startswith(_NO_WIDTHS):
            new = _divided(value, level.divisor)
        if new is not value:
            with suppress(TypeError, ValueError):  # checked by its class: it stays
                setattr(config, name, new)
        if "head_dim" in sizes and isinstance(value, dict) and "mrope_section" in value:
            # A rotary position in three axes: their parts of half a head.
            half = HEAD_DIM // 2
            value["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    if hasattr(config, "use_cache"):
        config.use_cache = False
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and isinstance(layers, int):
            # Different ones first, so that a layer of each kind is there where there is room.
            with suppress(AttributeError):
                setattr(config, name, [*dict.fromkeys(kinds), *kinds][:layers])


def _divided(value: Any, divisor: int) -> Any:
    """Widths, alone or in lists and dicts, in parts of what they were."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value // divisor if value >= LEAST_WIDTH and value % divisor == 0 else value
    if isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
        whole = all(v % divisor == 0 for v in value)
        return type(value)(v // divisor for v in value) if whole and any(value) else value
    if isinstance(value, dict):
        return {key: _divided(inner, divisor) for key, inner in value.items()}
    return value


_STAGES = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes")


def _smaller(name: str, value: Any, size: int | None, specials: Iterator[int]) -> Any:
    if isinstance(value, bool):
        return value
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
        return next(specials) if value >= SYMBOLS - 32 else value
    if name == "depths" and isinstance(value, list | tuple):
        return type(value)(1 for _ in value)
    if size is None:
        return value
    if value is None and name == "vocab_size":
        return size
    if isinstance(value, int | float):
        return type(value)(min(size, value) if size <= HEADS else size)
    if isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
        return type(value)(size for _ in value)
    return value


def inputs_of(model: nn.Module, config: Any) -> Iterator[Callable[[int], Batch]]:
    """What draws batches of what the model takes, one way after the other: its main input alone,
    or all of text, images and sound that it takes; sound as samples, or as frames."""
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", None)
    for makers in (_makers(config, sound) for sound in ((4000,), (1, 3840), _frames(config))):
        names = [name for name in makers if name in takes]
        if not names:
            raise ValueError(f"takes neither text nor images nor sound: {', '.join(takes)}")
        for some in [main] if main in names else names[:1], names:
            decoded = ["decoder_input_ids"] if config.is_encoder_decoder else []
            yield partial(_batch, makers, [*some, *(name for name in decoded if name in takes)])
        if "input_values" not in names:
            return


def _batch(makers: Mapping[str, Callable[[int], Tensor]], names: Sequence[str], n: int) -> Batch:
    given = {name: makers[name.removeprefix("decoder_")](n) for name in names}
    return Batch((), torch.randint(CLASSES, (n,)), given)


def _frames(config: Any) -> tuple[int, int]:
    return getattr(config, "max_length", 8 * LENGTH), getattr(config, "num_mel_bins", 80)


def _makers(config: Any, sound: tuple[int, ...]) -> dict[str, Callable[[int], Tensor]]:
    """What draws n samples of each kind of input."""
    insides = list(_inside(config))

    def said(name: str, otherwise: Any) -> Any:
        found = (getattr(c, name, None) for c in insides)
        return next((value for value in found if value is not None), otherwise)

    pixels, channels = said("image_size", PIXELS), said("num_channels", 3)
    high, wide = pixels if isinstance(pixels, list | tuple) else (pixels, pixels)
    frames, mel = said("num_frames", None), said("num_mel_bins", said("feature_size", 80))
    symbols = min(said("vocab_size", SYMBOLS), SYMBOLS) - 32
    # Whisper's family takes 30 seconds of sound and nothing else: twice its positions.
    steps = 2 * said("max_source_positions", 4 * LENGTH)
    shape = (channels, high, wide) if frames is None else (frames, channels, high, wide)
    return {
        "input_ids": lambda n: torch.randint(4, symbols, (n, LENGTH)),
        "pixel_values": lambda n: torch.randn(n, *shape),
        "pixel_values_videos": lambda n: torch.randn(n, frames or 4, channels, high, wide),
        "input_features": lambda n: torch.randn(n, mel, steps),
        "input_values": lambda n: torch.randn(n, *sound),
        "bbox": lambda n: torch.randint(40, (n, LENGTH, 4)).sort(-1).values,
    }


def loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of each row of the first answer against its sample's class."""
    first = answer(output)
    rows = first.reshape(len(target), -1, first.shape[-1])
    if rows.shape[-1] == 1:
        return (rows - target.reshape(-1, 1, 1)).square().mean()
    wanted = (target % rows.shape[-1]).repeat_interleave(rows.shape[1])
    return F.cross_entropy(rows.flatten(0, 1), wanted)


def answer(output: Any) -> Tensor:
    """The logits of an output, or the first floating tensor in it."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    leaves = pytree.tree_leaves(output)
    return next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.ndim)
