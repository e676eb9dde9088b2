"""Published families that are hard to divide: embeddings tied in three places, a text and an image
model with class and position embeddings of their own, experts that get no sample."""

from __future__ import annotations

import itertools

import meshwright as mw
import pytest
import torch
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.verify import verify_on_ranks
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option, tied_units, ties_agree
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.planner.solve.unit_options import all_options
from meshwright.profiler.model import profile
from transformers import (
    CLIPConfig,
    CLIPModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.strategies import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORLD, BATCH, LENGTH, WORDS = 2, 8, 6, 32


def t5() -> mw.Workload:
    """Encoder, decoder and head have one embedding."""
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip

    def make_batch(size: int) -> mw.Batch:
        words = torch.randint(1, WORDS, (size, LENGTH))
        return mw.Batch((), None, {"input_ids": words, "labels": words.flip(1)})

    return mw.Workload(
        "t5", T5ForConditionalGeneration(config), make_batch, lambda out, _: out.loss
    )


def clip() -> mw.Workload:
    """A loss over each pair of text and image; that over pairs of a batch no share of it has."""
    small = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    config = CLIPConfig(
        text_config={**small, "vocab_size": WORDS, "max_position_embeddings": LENGTH,
                     "eos_token_id": WORDS - 1},
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )  # fmt: skip

    def make_batch(size: int) -> mw.Batch:
        images = torch.randn(size, 3, 16, 16)
        words = torch.randint(WORDS, (size, LENGTH))
        return mw.Batch((), None, {"input_ids": words, "pixel_values": images})

    def loss(out, _):
        return (out.text_embeds - out.image_embeds).square().sum(1).mean()

    return mw.Workload("clip", CLIPModel(config), make_batch, loss)


def mixtral() -> mw.Workload:
    """Of four experts the last two get no sample."""
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            with torch.no_grad():
                parameter[2:] = parameter[:2].mean(0)  # never above both of the first

    def make_batch(size: int) -> mw.Batch:
        words = torch.randint(WORDS, (size, LENGTH))
        return mw.Batch((), None, {"input_ids": words, "labels": words})

    return mw.Workload("mixtral", model, make_batch, lambda out, _: out.loss)


FAMILIES = {build.__name__: build for build in (t5, clip, mixtral)}


def workload(name: str) -> mw.Workload:
    torch.manual_seed(0)
    return FAMILIES[name]()


def divided(found: ModelProfile) -> Plan:
    """Every unit divided over both ranks that can be, those that are tied by one style."""
    goal, whole = Goal(batch=BATCH), Option(data_parallel(WORLD))
    options = all_options(CostModel(found, cluster(WORLD), goal), CAPABILITY)
    chosen = [whole] * len(options)
    for tied in sorted(set(tied_units(found))):
        plain = [[o for o in options[k] if o == Option(o.layout, o.style)] for k in tied]
        for group in itertools.product(*plain):
            if group[0].layout.degree == WORLD and ties_agree(
                [found.units[k] for k in tied], group
            ):
                for k, option in zip(tied, group, strict=True):
                    chosen[k] = option
                break
    return make_plan(found, cluster(WORLD), goal, chosen, executor=CAPABILITY)


def verified(rank: int, name: str) -> tuple[Plan, list[str]]:
    def planned() -> Plan:
        return divided(profile(workload(name), batches=(4, 8), repeats=1, degrees=(WORLD,)))

    made = rank_zero_decides(planned)
    found = verify_on_ranks(made, workload(name), timeout_s=60)
    assert found.passed, (found.deviations, found.cause)
    return made, list(found.notes)


def divided_names(made: Plan) -> set[str]:
    return {unit.name for unit in made.units if unit.layout.degree > 1}


def test_an_embedding_tied_in_three_places_is_divided_in_all(ranks):
    made, _ = ranks(WORLD)(verified, "t5", limit_s=200)[0]
    assert {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"} <= divided_names(made)


def test_embeddings_of_a_module_with_children_leave_the_rest_divisible(ranks):
    made, _ = ranks(WORLD)(verified, "clip", limit_s=200)[0]
    names = divided_names(made)
    assert {f"{kind}_model.encoder.layers.0.mlp" for kind in ("text", "vision")} <= names
    assert any("patch_embedding" in name for name in names)


def test_experts_without_a_sample_are_divided_with_the_others(ranks):
    alone = workload("mixtral")
    alone.model(**alone.make_batch(BATCH).kwargs).loss.backward()
    experts = alone.model.model.layers[0].mlp.experts.gate_up_proj.grad
    assert [bool(own.any()) for own in experts] == [True, True, False, False]
    made, _ = ranks(WORLD)(verified, "mixtral", limit_s=200)[0]
    assert {f"model.layers.{i}.mlp" for i in range(2)} <= divided_names(made)
