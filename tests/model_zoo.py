"""Small sentence-transformers folders with random weights, one an architecture, made in a second without a network.

The weights are drawn wide (`initializer_range` 0.5 and not 0.02): with the usual range a tiny model is nearly constant
and a wrong attention would not show in its vectors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

_WORDS = (
    "river stone window paper garden engine music winter silver market bridge forest letter shadow copper island "
    "morning kitchen thunder basket planet velvet harbor candle meadow rocket pencil desert mirror button valley "
    "search vector index shard token batch length prompt query document model layer linear attention"
)
WORDS = _WORDS.split()
# Enough sentences for a trainer to merge the words' letters.
CORPUS = [" ".join(WORDS[(i * k) % len(WORDS)] for i in range(12)) for k in range(1, 60)]

TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}


def sentence(num_words: int, seed: int = 0) -> str:
    """`num_words` words that the tokenizers know, others for another seed."""
    return " ".join(WORDS[(seed * 31 + i * (seed + 7)) % len(WORDS)] for i in range(num_words))


def wordpiece(special: list[str] | None = None) -> tokenizers.Tokenizer:
    """As BERT: pad 0, unk 1, cls 2, sep 3."""
    special = special or ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    unk = special[1] if special[1] == "[UNK]" else "[UNK]"
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=unk))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _template(tokenizer, "[CLS]", "[SEP]")
    return tokenizer


def byte_bpe(bos: str | None = "<s>", eos: str = "</s>") -> tokenizers.Tokenizer:
    """As RoBERTa (bos 0, pad 1, eos 2), or as Qwen with an end token only."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _template(tokenizer, bos, eos)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """As XLM-RoBERTa: bos 0, pad 1, eos 2."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=250,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _template(tokenizer, "<s>", "</s>")
    return tokenizer


def gemma_bpe() -> tokenizers.Tokenizer:
    """As Gemma: spaces become marks before the split, so all of a text is one word to the BPE."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"],
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = _template(tokenizer, "<bos>", "<eos>")
    return tokenizer


def _template(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str) -> processors.TemplateProcessing:
    used = [token for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(
        single=f"{bos} $A {eos}" if bos else f"$A {eos}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in used],
    )


_BERT_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_ROBERTA_SPECIAL = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_QWEN_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_GEMMA_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
_ROBERTA_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_BERT_IDS = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}

ARCHITECTURES = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "nomic_bert", "qwen3", "gemma3", "mpnet")


def build(architecture: str, folder: Path, *, max_length: int = 200, **config: Any) -> Path:
    """Write a sentence-transformers folder of `architecture` with the pooling its relatives use.

    Args:
        folder: made if needed.
        max_length: the tokenizer's limit.
        config: overrides of the transformers config.
    """
    tokenizer, special, pooling = _tokenizer_and_pooling(architecture)
    model = _model(architecture, tokenizer.get_vocab_size(), config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **special)
    fast.save_pretrained(folder)
    write_modules(folder, pooling=pooling, dim=model.config.hidden_size)
    return folder


def write_modules(folder: Path, *, pooling: str | list[str], dim: int, include_prompt: bool = True) -> None:
    """Transformer > Pooling > Normalize."""
    package = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{package}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{package}.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SentenceTransformer"}))
    write_pooling(folder, pooling=pooling, dim=dim, include_prompt=include_prompt)


def write_pooling(folder: Path, *, pooling: str | list[str], dim: int, include_prompt: bool = True) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"embedding_dimension": dim, "pooling_mode": pooling, "include_prompt": include_prompt}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def _tokenizer_and_pooling(architecture: str) -> tuple[tokenizers.Tokenizer, dict[str, str], str]:
    if architecture in ("bert", "distilbert", "nomic_bert"):
        return wordpiece(), _BERT_SPECIAL, "mean"
    if architecture == "modernbert":
        return wordpiece(), _BERT_SPECIAL, "cls"
    if architecture == "xlm-roberta":
        return unigram(), _ROBERTA_SPECIAL, "mean"
    if architecture in ("roberta", "mpnet"):
        return byte_bpe(), _ROBERTA_SPECIAL, "mean"
    if architecture == "qwen3":
        return byte_bpe(bos=None), _QWEN_SPECIAL, "lasttoken"
    assert architecture == "gemma3", architecture
    return gemma_bpe(), _GEMMA_SPECIAL, "mean"


def _model(architecture: str, vocab_size: int, overrides: dict[str, Any]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    common = {"vocab_size": vocab_size, "initializer_range": 0.5}
    if architecture == "bert":
        config = transformers.BertConfig(**{**common, **TINY, **_BERT_IDS, "max_position_embeddings": 300, **overrides})
    elif architecture == "roberta":
        config = transformers.RobertaConfig(
            **{**common, **TINY, **_ROBERTA_IDS, "max_position_embeddings": 300, "type_vocab_size": 1, **overrides}
        )
    elif architecture == "xlm-roberta":
        config = transformers.XLMRobertaConfig(
            **{**common, **TINY, **_ROBERTA_IDS, "max_position_embeddings": 300, "type_vocab_size": 1, **overrides}
        )
    elif architecture == "distilbert":
        shape = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 300}
        config = transformers.DistilBertConfig(**{**common, **shape, "pad_token_id": 0, **overrides})
    elif architecture == "modernbert":
        config = transformers.ModernBertConfig(**{**common, **TINY, **_BERT_IDS, "local_attention": 16, **overrides})
    elif architecture == "nomic_bert":
        config = transformers.NomicBertConfig(**{**common, **TINY, "pad_token_id": 0, **overrides})
    elif architecture == "qwen3":
        shape = {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1, "eos_token_id": 2}
        config = transformers.Qwen3Config(**{**common, **TINY, **shape, **overrides})
    elif architecture == "gemma3":
        shape = {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
        }
        config = transformers.Gemma3TextConfig(**{**common, **TINY, **shape, **overrides})
    else:
        assert architecture == "mpnet", architecture
        config = transformers.MPNetConfig(
            **{**common, **TINY, **_ROBERTA_IDS, "max_position_embeddings": 300, **overrides}
        )
    return transformers.AutoModel.from_config(config).eval()
