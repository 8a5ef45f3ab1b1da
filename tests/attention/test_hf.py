"""The registered attention is each model's own, in values and gradients; packed, padded and cached rows equal rows alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import EXACT, PLAIN, ROPE, SINKS, VOCABULARY, difference, ids, made, slopes
from torch import Tensor

from savepoint.attention import hf
from savepoint.attention.sink import sink_attention

OURS = "savepoint_sink"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    assert hf.register() == OURS
    assert hf.register("savepoint_reference", backend="eager") == "savepoint_reference"


def tolerance(architecture: str) -> float:
    return 1e-10 if architecture in EXACT else 5e-6


@pytest.mark.parametrize("architecture", SINKS + PLAIN)
def test_values_and_gradients_are_those_of_the_models_own_eager_attention(architecture: str):
    eager, ours = made(architecture), made(architecture, OURS)
    tokens = ids(2, 19)
    expected, got = (model(input_ids=tokens, use_cache=False).logits for model in (eager, ours))
    assert difference(got, expected) <= tolerance(architecture)
    theirs, mine = slopes(eager, expected), slopes(ours, got)
    assert mine.keys() == theirs.keys() and (architecture in PLAIN or any(name.endswith("sinks") for name in mine))
    for name, slope in theirs.items():
        assert slope.abs().max() > 0 and difference(mine[name], slope) <= 10 * tolerance(architecture), name


@pytest.mark.parametrize("architecture", SINKS + PLAIN)
def test_packed_rows_equal_rows_alone_in_values_and_gradients(architecture: str):
    model = made(architecture, OURS)
    documents = [ids(1, n, seed=n) for n in (7, 1, 12)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    packed = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=d, use_cache=False).logits for d in documents], 1)
    assert difference(packed, alone) <= 1e-6
    mine, theirs = slopes(model, packed), slopes(model, alone)
    for name, slope in theirs.items():
        assert difference(mine[name], slope) <= 1e-5, name


def test_bounds_given_by_the_caller_are_the_documents():
    model = made("gpt_oss", OURS)
    arguments = hf.packed_arguments([7, 12])
    packed = model(input_ids=ids(1, 19), use_cache=False, **arguments).logits
    by_positions = model(input_ids=ids(1, 19), use_cache=False, position_ids=arguments["position_ids"]).logits
    assert torch.equal(packed, by_positions)


def test_rows_of_a_batch_have_documents_of_their_own():
    model = made("gpt_oss", OURS)
    tokens = ids(3, 9)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8, 0, 0, 0, 1]])
    got = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    for row, cuts in ((0, [0, 3, 9]), (1, [0, 9]), (2, [0, 5, 6, 7, 9])):
        for a, b in zip(cuts, cuts[1:], strict=False):
            alone = model(input_ids=tokens[row : row + 1, a:b], position_ids=positions[row : row + 1, a:b], use_cache=False).logits[0]
            assert difference(got[row, a:b], alone) <= 1e-6, (row, a)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given_positions", [False, True])
def test_padding_equals_alone(side: str, given_positions: bool):
    model = made("gpt_oss", OURS)
    rows = [ids(1, n, seed=n) for n in (11, 4, 1)]
    padded, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(11 - row.shape[1], 11) if side == "left" else slice(row.shape[1])
        padded[i, at], mask[i, at] = row[0], 1
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if given_positions else {}
    got = model(input_ids=padded, attention_mask=mask, use_cache=False, **positions).logits
    assert torch.isfinite(got).all()
    got.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    for i, row in enumerate(rows):
        offset = 0 if given_positions or side == "right" else 11 - row.shape[1]  # rotary positions only ever enter as differences
        alone = model(input_ids=row, position_ids=torch.arange(row.shape[1])[None] + offset, use_cache=False).logits[0]
        assert difference(got[i, mask[i].bool()], alone) <= 1e-6


def test_documents_within_padded_rows_are_read_among_real_tokens():
    model = made("gpt_oss", OURS)
    row = ids(1, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2, 0, 1, 2, 3]])  # the paddings' own positions would read as documents
    got = model(input_ids=row, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
    for a, b in ((2, 5), (5, 9)):
        assert difference(got[a:b], model(input_ids=row[:, a:b], use_cache=False).logits[0]) <= 1e-6


def test_a_row_that_is_all_padding_is_finite_and_learns_nothing():
    model = made("gpt_oss", OURS)
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    logits = model(input_ids=ids(2, 3), attention_mask=mask, use_cache=False).logits
    assert torch.isfinite(logits).all()
    nothing = model(input_ids=ids(2, 3), attention_mask=torch.zeros(2, 3, dtype=torch.long), use_cache=False).logits
    assert torch.isfinite(nothing).all()


@pytest.mark.parametrize("architecture", ["gpt_oss", "mimo_v2_flash", "llama"])
def test_generation_with_a_cache_equals_reading_everything_again(architecture: str):
    model = made(architecture, OURS)
    prompts = [ids(1, n, seed=n) for n in (9, 3)]
    padded, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        padded[i, 9 - prompt.shape[1] :], mask[i, 9 - prompt.shape[1] :] = prompt[0], 1
    settings: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    together = model.generate(padded, attention_mask=mask, **settings)[:, 9:]
    for i, prompt in enumerate(prompts):
        row = prompt
        for token in together[i]:
            logits = model(input_ids=row, use_cache=False).logits[0, -1].clone()
            logits[2] = -torch.inf  # the end token, which min_new_tokens rules out
            assert int(logits.argmax()) == int(token)
            row = torch.cat((row, token.view(1, 1)), 1)
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, prompt.shape[1] :]
        assert torch.equal(alone[0], together[i])


def test_a_past_in_pieces_equals_the_whole():
    model = made("gpt_oss", OURS)
    tokens = ids(2, 17)
    whole = model(input_ids=tokens, use_cache=False).logits
    cache, parts = transformers.DynamicCache(config=model.config), []
    for a, b in ((0, 6), (6, 13), (13, 17)):
        parts.append(model(input_ids=tokens[:, a:b], cache=cache, use_cache=True).logits)
    assert difference(torch.cat(parts, 1), whole) <= 1e-10


def test_one_token_is_enough_and_none_is_refused():
    model = made("gpt_oss", OURS)
    assert model(input_ids=ids(1, 1), use_cache=False).logits.shape == (1, 1, VOCABULARY)
    with pytest.raises(ValueError, match="T"):
        hf.SinkAttention("eager")(None, *[torch.zeros(1, 4, 0, 8)] * 3, None)


def test_a_window_of_nothing_is_refused():
    model = made("gpt_oss", OURS)
    model.model.layers[0].self_attn.sliding_window = 0
    with pytest.raises(ValueError, match="window"):
        model(input_ids=ids(1, 4), use_cache=False)


@pytest.mark.parametrize("name", ["flash", "our_flash_attention", "Flash", "kernels/ours", "", "eager", "sdpa", "flex_attention", "paged|ours"])
def test_names_that_transformers_keeps_for_itself_are_refused(name: str):
    with pytest.raises(ValueError, match="name"):
        hf.register(name)


def test_an_unknown_backend_is_refused_when_it_is_registered():
    with pytest.raises(ValueError, match=r"unknown 'fastest' \(known: auto, eager"):
        hf.register("savepoint_other", backend="fastest")


def attend(module: Any = None, **changes: Any) -> Tensor:
    class Module:
        training = True

    q, kv = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    given: dict[str, Any] = {"attention_mask": None, "s_aux": torch.zeros(4), **changes}
    return hf.SinkAttention("eager")(module or Module(), q, kv, kv, **given)[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(2, 1, 6, 6)}, "attention_mask"),
        ({"softcap": 30.0}, "softcap"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"sinks": torch.zeros(4), "s_aux": None}, "sinks"),
        ({"is_causal": False}, "is_causal"),
        ({"position_ids": torch.zeros(3, 2, 6, dtype=torch.long)}, "position_ids"),
        ({"cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32)}, "cu_seq_lens_q"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        attend(**changes)


def test_dropout_is_no_matter_outside_training():
    class Module:
        training = False

    assert attend(Module(), dropout=0.1).shape == (2, 6, 4, 8)


def test_sinks_that_are_not_handed_over_are_missed():
    class Forgetful:
        training, sinks = True, torch.zeros(4)

    with pytest.raises(ValueError, match="has sinks and does not hand them"):
        attend(Forgetful(), s_aux=None)


def test_packed_rows_over_a_cache_are_refused():
    model = made("gpt_oss", OURS)
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=ids(1, 4), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids(1, 4), cache=cache, use_cache=True, position_ids=torch.tensor([[4, 5, 0, 1]]))


def test_a_cache_of_fixed_size_is_refused():
    model = made("llama", OURS)
    with pytest.raises(ValueError, match="fixed size"):
        model(input_ids=ids(1, 4), cache=transformers.StaticCache(config=model.config, max_cache_len=16), use_cache=True)


def test_masks_that_see_ahead_or_go_by_chunks_are_refused():
    sees_all = lambda b, h, q, k: q.new_ones((), dtype=torch.bool)  # noqa: E731
    with pytest.raises(ValueError, match="what comes later"):
        hf.padding_mask(1, 4, 4, mask_function=sees_all)

    class Chunked:
        layer_types = ("chunked_attention",)

    with pytest.raises(ValueError, match="chunked_attention"):
        hf.padding_mask(1, 4, 4, config=Chunked())


@pytest.mark.parametrize("architecture", SINKS + PLAIN)
def test_models_that_keep_documents_apart_pass_the_check(architecture: str):
    hf.check_packing(made(architecture, OURS, torch.float32))


def test_a_model_with_its_own_attention_is_no_place_for_packed_rows():
    with pytest.raises(ValueError, match="'eager'.*does not keep packed documents apart"):
        hf.check_packing(made("gpt_oss"))


def test_a_model_whose_layers_mix_documents_in_another_way_is_found_out():
    config = transformers.Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=OURS)
    with pytest.raises(ValueError, match=r"'lfm2' model mixes packed documents \(layers: conv, full_attention\)"):
        hf.check_packing(model)


def test_a_model_that_keeps_its_documents_to_itself_is_found_out(monkeypatch: pytest.MonkeyPatch):
    model = made("llama", OURS, torch.float32)
    inner = model.model.layers[0].self_attn.forward

    def forgetful(*args: Any, position_ids: Any = None, cu_seq_lens_q: Any = None, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", forgetful)
    with pytest.raises(ValueError, match="mixes packed documents"):
        hf.check_packing(model)


def test_a_model_that_attends_both_ways_is_refused():
    config = transformers.OpenAIPrivacyFilterConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=2, num_experts_per_tok=1, pad_token_id=0, eos_token_id=2, rope_parameters=ROPE,
    )  # fmt: skip
    model = transformers.OpenAIPrivacyFilterModel._from_config(config, attn_implementation=OURS)
    with pytest.raises(ValueError, match="later"):
        model(input_ids=ids(1, 5))


def test_documents_need_tokens():
    for lengths in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one token"):
            hf.packed_arguments(lengths)


def test_the_named_backend_is_the_one_that_computes(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def spy(*args: Any, backend: str, **kwargs: Any) -> Any:
        asked.append(backend)
        return sink_attention(*args, backend=backend, **kwargs)

    monkeypatch.setattr(hf, "sink_attention", spy)
    made("gpt_oss", "savepoint_reference")(input_ids=ids(1, 5), use_cache=False)
    assert asked == ["eager", "eager"]


_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_TINY, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8,
    "index_topk": 4, "sliding_window": 8,
}  # fmt: skip


def from_config(config: Any, implementation: str, model: Any = transformers.AutoModelForCausalLM) -> Any:
    torch.manual_seed(0)
    make = model.from_config if model is transformers.AutoModelForCausalLM else model._from_config
    return make(config, attn_implementation=implementation, experts_implementation="eager").eval()


def test_compressed_keys_are_refused():
    with pytest.raises(ValueError, match="compressed or selected keys"):
        from_config(transformers.DeepseekV4Config(**_DEEPSEEK), OURS)(input_ids=ids(1, 20), use_cache=False)


def test_the_sliding_layers_of_deepseek_v4_are_its_own():
    config = transformers.DeepseekV4Config(**_DEEPSEEK, layer_types=["sliding_attention"] * 2)
    eager, ours = from_config(config, "eager"), from_config(config, OURS)
    expected, got = (model(input_ids=ids(1, 20), use_cache=False).logits for model in (eager, ours))
    assert difference(got, expected) <= 1e-4
    theirs, mine = slopes(eager, expected), slopes(ours, got)
    assert all(difference(mine[name], slope) <= 1e-3 for name, slope in theirs.items())


def test_selected_keys_are_refused():
    config = transformers.HYV4Config(
        **_TINY, intermediate_size=32, num_key_value_heads=4, head_dim=16, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, index_topk=4, index_head_dim=8, index_n_heads=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="indexed_attention"):
        from_config(config, OURS)(input_ids=ids(1, 20), use_cache=False)


def test_a_bias_on_the_scores_is_refused():
    config = transformers.Inkling2TextConfig(
        **_TINY, num_key_value_heads=2, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=8, d_rel=4,
        rel_extent=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="position_bias"):
        from_config(config, OURS, transformers.Inkling2ForCausalLM)(input_ids=ids(1, 20), use_cache=False)


def test_sinks_that_a_layer_lost_are_missed():
    model = made("mimo_v2_flash", OURS)
    hf.check_sinks(model)  # its full layers have none, and should not
    sliding = next(layer.self_attn for layer in model.model.layers if layer.self_attn.sliding_window)
    sliding.sinks = None
    with pytest.raises(ValueError, match=r"self_attn of this 'mimo_v2_flash' model has none"):
        hf.check_sinks(model)
