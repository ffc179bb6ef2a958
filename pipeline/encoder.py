"""Turns batches of token ids into vectors that equal sentence-transformers' own.

sentence-transformers loads the folder: its modules, lengths and prompts are the format. The forward is ours. Texts lie
back to back in one sequence without padding, one attention function keeps them apart (`pipeline.attention`), and
pooling runs in float32 on the flat states (`pipeline.pooling`). A vector does not depend on which texts share its
batch, to float32 rounding.

Some architectures accept a foreign attention function and compute wrong numbers in silence. So nothing is believed:
at load the interface flags are read, the calls of the function are counted, and vectors of probe texts are compared
with sentence-transformers' one by one. What fails is run with ordinary padding instead, or refused if it was asked for.

It does not tokenize and does not plan batches; it holds one device.
"""

from __future__ import annotations

import copy
import gc
import inspect
import random
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline import attention
from pipeline.attention import Packed
from pipeline.batcher import pack
from pipeline.devices import resolve_dtype
from pipeline.errors import ModelError, one_line
from pipeline.linear import PackedLinears
from pipeline.loader import load_sentence_transformer
from pipeline.model import open_model
from pipeline.pooling import Chain, Finish, Segments
from pipeline.records import Batch, EncoderSettings, Tokens
from pipeline.tokenizer import Tokenizer, TokenizerSpec
from pipeline.transfer import Download, Transfer

# Largest |difference| to sentence-transformers' vector of the same text, relative to that vector's length. float32 is
# the promise; half precision only has to tell rounding (cos about 0.99999 in float16, 0.999 in bfloat16) from a wrong
# attention (cos below 0.9).
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# The longest one goes beyond the sliding windows in use, as far as the length limit allows.
_PROBE_WORDS = (1, 2, 3, 9, 40, 150, 520)


class Encoder:
    """One loaded model on one device.

    Attributes:
        dim: length of a vector.
        attention: what is used: ``torch-varlen``, ``flash-attn``, ``grouped`` or ``padded``.
        attention_reason: why texts are padded although nobody asked for it; otherwise empty.
        device: ``cpu``, ``cuda:0`` …
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        max_length: token limit, special tokens included; None for no limit.
        num_parameters: weights of the transformer.
        num_oom_splits: how often a batch did not fit the device and was halved.
        token_limit: tokens of a batch that the device has room for, once one did not fit; None before.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        """Use `Encoder.load`."""
        path = Path(settings.model_path)
        folder = open_model(settings.model_path, trust_remote_code=settings.trust_remote_code)
        self._settings = settings
        self.device = settings.device
        self._device = torch.device(settings.device)
        self._transfer = Transfer(self._device)
        dtype = resolve_dtype(settings.dtype, settings.device, folder.checkpoint_dtype)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.dtype = str(self._dtype).removeprefix("torch.")
        self._st = load_sentence_transformer(
            path, settings.device, self._dtype, trust_remote_code=settings.trust_remote_code
        )
        # nn.Module types every attribute as a tensor or a module.
        self._transformer = cast("Any", self._st[0])
        self._model = self._transformer.model
        self._check_supported()
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._inputs = set(inspect.signature(self._model.forward).parameters)
        self._takes_token_types = "token_type_ids" in self._inputs
        self._position_padding_idx = _position_padding_idx(self._model)
        self.max_length = self._resolve_max_length()
        self._tokenizer = Tokenizer(self.tokenizer_spec())
        self._chain = Chain.of(self._st, self._prompt_length(), settings.normalize)
        self._finish = Finish.of(settings, self._chain, self._st.truncate_dim)
        self.num_oom_splits = 0
        self.token_limit: int | None = None
        self._float32: Encoder | None = None
        self._linears: PackedLinears | None = None
        self.attention, self.attention_reason = self._choose_attention()
        self.dim = self._check_dimensions()

    @classmethod
    def load(cls, settings: EncoderSettings) -> Encoder:
        """Load, choose the attention, and prove the result against sentence-transformers.

        Raises:
            ModelError: the folder cannot be loaded, has parts that are not supported, or its vectors cannot be
                reproduced with the attention that was asked for.
        """
        return cls(settings)

    @property
    def transformer(self) -> nn.Module:
        """The transformer itself, without pooling and what comes after it."""
        model: nn.Module = self._model
        return model

    @property
    def padded(self) -> bool:
        """Whether a batch costs num_texts * longest instead of its tokens."""
        return self.attention == "padded"

    def computed_tokens(self, batch: Batch) -> int:
        """Tokens that go through the model for `batch`, padding included."""
        return batch.num_texts * batch.max_seqlen if self.padded else batch.num_tokens

    def tokenizer_spec(self) -> TokenizerSpec:
        """What a `Tokenizer` in another process needs to feed this model."""
        tokenizer = self._transformer.tokenizer
        serialised = copy.deepcopy(tokenizer.backend_tokenizer)
        serialised.no_padding()
        serialised.no_truncation()
        return TokenizerSpec(
            json=serialised.to_str(),
            max_length=self.max_length,
            truncation_side=tokenizer.truncation_side,
            prompt=self._settings.prompt,
            lower_case=bool(self._transformer.do_lower_case),
            split_special_tokens=bool(tokenizer.split_special_tokens),
        )

    def encode(self, batch: Batch) -> NDArray[np.float32]:
        """The final vector of each text: ``submit`` and its result in one."""
        return self.submit(batch).result()

    def submit(self, batch: Batch) -> Submitted:
        """Start computing a batch; on CUDA it goes on while the host does something else.

        A batch that does not fit the device is halved until it does, and ``token_limit`` then says what did.
        """
        nonempty = np.flatnonzero(batch.lengths)
        parts = self._start_or_split(_select(batch, nonempty)) if len(nonempty) else []
        return Submitted(self, batch, nonempty, parts)

    def finished(self, batch: Batch, nonempty: NDArray[np.int64], parts: list[Download]) -> NDArray[np.float32]:
        """(num_texts, dim) float32 of a submitted batch; see `Submitted`."""
        vectors = np.full((batch.num_texts, self.dim), np.nan, np.float32)
        if parts:
            vectors[nonempty] = np.concatenate([part.result() for part in parts])
        broken = nonempty[~np.isfinite(vectors[nonempty]).all(axis=1)]
        if len(broken) and self._dtype != torch.float32:
            vectors[broken] = self._in_float32().encode(_select(batch, broken))
        vectors[~np.isfinite(vectors).all(axis=1)] = np.nan
        return vectors

    def _start_or_split(self, batch: Batch) -> list[Download]:
        try:
            return [self._compute(batch, self._chain.after_pooling, self._finish)]
        except torch.OutOfMemoryError as error:
            if batch.num_texts == 1:
                raise ModelError(
                    f"a text of {batch.num_tokens} tokens does not fit into the memory of {self.device}; "
                    "give a smaller --max-length"
                ) from error
        # Outside the except block: its traceback keeps the failed forward's tensors alive.
        self.num_oom_splits += 1
        self.token_limit = max(1, min(self.token_limit or batch.num_tokens, batch.num_tokens // 2))
        gc.collect()
        torch.cuda.empty_cache()
        halves = np.array_split(np.arange(batch.num_texts), 2)
        return [part for half in halves for part in self._start_or_split(_select(batch, half))]

    @torch.inference_mode()
    def _compute(self, batch: Batch, after_pooling: tuple[nn.Module, ...], finish: Finish | None) -> Download:
        """Forward, pooling and the modules behind it; no text of `batch` is empty."""
        inputs = _DeviceBatch.of(batch, self._transfer)
        began = self._transfer.begin()
        states = self._forward_padded(inputs) if self.padded else self._forward_packed(inputs)
        vectors = self._chain.vectors(states, inputs.segments, after_pooling)
        if finish is not None:
            vectors = finish(vectors)
        return self._transfer.download(vectors, began)

    def _forward_packed(self, inputs: _DeviceBatch) -> Tensor:
        """(T, hidden) states of a forward without padding, in the model's dtype."""
        packed = Packed(self.attention, inputs.runs, inputs.cu_seqlens, inputs.max_seqlen)
        arguments: dict[str, Any] = {
            "input_ids": inputs.input_ids.unsqueeze(0),
            "position_ids": inputs.position_ids(self._position_padding_idx).unsqueeze(0),
            "attention_mask": None,
            "packed": packed,
            # transformers' own names for the same, for models that read them outside attention.
            "cu_seq_lens_q": inputs.cu_seqlens,
            "cu_seq_lens_k": inputs.cu_seqlens,
            "max_length_q": inputs.max_seqlen,
            "max_length_k": inputs.max_seqlen,
        }
        if self._takes_token_types:
            # Left out, BERT takes them from a buffer of its own by position.
            arguments["token_type_ids"] = torch.zeros_like(arguments["input_ids"])
        if "use_cache" in self._inputs:
            arguments["use_cache"] = False
        output = self._model(**arguments)
        expected = self._model.config.get_text_config().num_hidden_layers
        if packed.num_calls != expected:
            raise ModelError(f"packed attention was called {packed.num_calls} times for {expected} layers")
        states: Tensor = output["last_hidden_state"][0]
        return states

    def _forward_padded(self, inputs: _DeviceBatch) -> Tensor:
        """(T, hidden) states of an ordinary forward, padded on the right and unpadded again."""
        num_texts = len(inputs.segments.lengths)
        # Slot of each token in the padded (num_texts, longest) rectangle.
        rows = torch.arange(num_texts, device=self._device) * inputs.max_seqlen
        slots = _spread(rows, inputs.segments.lengths, len(inputs.input_ids)) + inputs.segments.positions
        pad_id = self._transformer.tokenizer.pad_token_id or 0
        size = num_texts * inputs.max_seqlen
        ids = torch.full((size,), pad_id, device=self._device).index_copy_(0, slots, inputs.input_ids)
        mask = torch.zeros(size, dtype=torch.int64, device=self._device).index_fill_(0, slots, 1)
        arguments = {"input_ids": ids.view(num_texts, -1), "attention_mask": mask.view(num_texts, -1)}
        if self._takes_token_types and "token_type_ids" in self._transformer.tokenizer.model_input_names:
            arguments["token_type_ids"] = torch.zeros_like(arguments["input_ids"])
        states: Tensor = self._model(**arguments)["last_hidden_state"]
        return states.flatten(0, 1)[slots]

    def _in_float32(self) -> Encoder:
        """The same model in float32, loaded when first needed; on the CPU where the device has no room for both."""
        if self._float32 is None:
            settings = replace(self._settings, dtype="float32", attention="auto")
            try:
                self._float32 = Encoder.load(settings)
            except ModelError:
                self._float32 = Encoder.load(replace(settings, device="cpu"))
        return self._float32

    # -- what the folder says ------------------------------------------------------------------------------------

    def _check_supported(self) -> None:
        transformer, path = self._transformer, self._settings.model_path
        if "message" in transformer.modality_config:
            raise ModelError(f"{path}: the model renders texts through a chat template, which is not supported")
        text = transformer.modality_config.get("text", {})
        if text.get("method") != "forward" or text.get("method_output_name") not in (
            "last_hidden_state",
            ("last_hidden_state",),
            ["last_hidden_state"],
        ):
            raise ModelError(f"{path}: the Transformer's text modality is {text or 'missing'}, which is not supported")
        if transformer.module_output_name != "token_embeddings":
            raise ModelError(f"{path}: the Transformer gives {transformer.module_output_name}, not token_embeddings")
        if transformer.tokenizer is None or not transformer.tokenizer.is_fast:
            raise ModelError(f"{path}: the model has no tokenizer.json tokenizer")
        unknown = {k for part in ("text", "common") for k in transformer.processing_kwargs.get(part, {})}
        if unknown:
            raise ModelError(f"{path}: processing_kwargs {', '.join(sorted(unknown))} are not supported")

    def _resolve_max_length(self) -> int | None:
        """The limit sentence-transformers would use, or the one asked for; never more than there are positions."""
        tokenizer = self._transformer.tokenizer
        own = self._transformer.document_length or tokenizer.model_max_length
        # transformers writes "no limit" as 10**30.
        limit: int | None = None if own > 10**9 else int(own)
        positions = _num_positions(self._model, self._position_padding_idx)
        asked = self._settings.max_length
        if asked is not None and positions is not None and asked > positions:
            raise ModelError(f"--max-length {asked}: the model has only {positions} positions; give at most that")
        limit = limit if asked is None else asked
        if positions is not None:
            limit = positions if limit is None else min(limit, positions)
        tokenizer.model_max_length = limit if limit is not None else int(1e30)
        return limit

    def _prompt_length(self) -> int:
        """Leading tokens that pooling leaves out, as sentence-transformers counts them: without a last special one."""
        [pooling] = (cast("Any", module) for module in self._st if type(module).__name__ == "Pooling")
        if not self._settings.prompt or pooling.include_prompt:
            return 0
        ids = self._tokenizer.encode([""]).input_ids
        special = self._transformer.tokenizer.all_special_ids
        return len(ids) - 1 if len(ids) and int(ids[-1]) in special else len(ids)

    def _check_dimensions(self) -> int:
        wanted = self._finish.dimensions
        if self._settings.dimensions is not None and not 1 <= self._settings.dimensions <= self._probe_dim:
            raise ModelError(f"--dimensions {wanted}: the model gives vectors of {self._probe_dim}; give at most that")
        return self._probe_dim if wanted is None else min(wanted, self._probe_dim)

    # -- the gate ------------------------------------------------------------------------------------------------

    def _choose_attention(self) -> tuple[str, str]:
        """The best kind that passes; and why not a packed one, when padding was not asked for."""
        capability = torch.cuda.get_device_capability(self._device) if self._device.type == "cuda" else None
        asked = self._settings.attention
        kinds = attention.choose_kinds(asked, self._device.type, self._dtype != torch.float32, capability)
        texts = _probe_texts(self._tokenizer.words())
        tokens = self._tokenizer.encode(texts)
        order = np.argsort(-tokens.lengths, kind="stable").astype(np.int64)
        batch = pack(tokens, order)
        expected = self._reference([texts[i] for i in order])
        self._probe_dim = int(expected.shape[1])
        original = self._model.config._attn_implementation
        reasons = []
        for kind in kinds:
            try:
                self._switch_to(kind)
                self._prove(batch, expected)
                return kind, ""
            except Exception as error:  # a foreign forward may fail in any way; the reason is kept
                if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    name = type(self._model).__name__
                    raise ModelError(f"--compile: {name} cannot be compiled here: {one_line(error)}") from error
                reasons.append(f"{kind}: {one_line(error)}")
                self._switch_back(original)
        if kinds and asked != "auto":
            raise ModelError(f"{self._settings.model_path}: attention {reasons[0]}; use --attention auto")
        self.attention = "padded"
        try:
            self._prove(batch, expected)
        except Exception as error:
            raise ModelError(f"{self._settings.model_path}: vectors cannot be reproduced, {one_line(error)}") from error
        return "padded", "; ".join(reasons)

    def _switch_to(self, kind: str) -> None:
        cls = type(self._model)
        if not cls._supports_attention_backend or not cls._can_set_attn_implementation():
            raise ModelError(f"{cls.__name__} does not take a foreign attention function")
        if "position_ids" not in self._inputs:
            raise ModelError(f"{cls.__name__} does not take position_ids")
        attention.register(compiled=self._settings.compile)
        self._model.set_attn_implementation(attention.NAME)
        if self._model.config._attn_implementation != attention.NAME:
            raise ModelError(f"{cls.__name__} did not take the attention function")
        self.attention = kind

    def _switch_back(self, original: str) -> None:
        if self._model.config._attn_implementation != original:
            self._model.set_attn_implementation(original)

    def _reference(self, texts: list[str]) -> NDArray[np.float32]:
        """sentence-transformers' own vectors, one text at a time, all dimensions."""
        truncate_dim, self._st.truncate_dim = self._st.truncate_dim, None
        try:
            rows = [
                self._st.encode([t], prompt=self._settings.prompt, convert_to_tensor=True, show_progress_bar=False)[0]
                for t in texts
            ]
        except Exception as error:  # all of it is foreign
            raise ModelError(
                f"{self._settings.model_path}: sentence-transformers itself cannot encode with it: {one_line(error)}"
            ) from error
        finally:
            self._st.truncate_dim = truncate_dim
        stacked: NDArray[np.float32] = torch.stack(rows).float().cpu().numpy()
        return stacked

    def _prove(self, batch: Batch, expected: NDArray[np.float32]) -> None:
        """Raise unless the probe batch gives the reference vectors, with faster linear layers if those pass too."""
        if self._settings.compile:
            self._compile()
        elif self._device.type == "cpu" and self._dtype == torch.float32:
            linears = PackedLinears(self._model)
            try:
                self._compare(batch, expected)
                self._linears = linears
                linears.forget_originals()
                return
            except Exception:  # whatever it is, the plain layers decide
                linears.undo()
        self._compare(batch, expected)

    def _compile(self) -> None:
        """Fuse what lies between matrix products. Attention stays as it is: its kernels are fused already.

        Compiled without a fixed shape; oneDNN's packed layers, which the compiler cannot take in, are not used.
        """
        self._model.compile(dynamic=True)

    def _compare(self, batch: Batch, expected: NDArray[np.float32]) -> None:
        found = self._compute(batch, self._chain.all_after_pooling, None).result()
        scale = np.linalg.norm(expected, axis=1, keepdims=True).clip(min=1e-12)
        error = float(np.max(np.abs(found - expected) / scale)) if np.isfinite(found).all() else float("inf")
        if not error <= _TOLERANCE[self._dtype]:
            raise ModelError(
                f"probe vectors differ from sentence-transformers' by {error:.1e}, "
                f"allowed {_TOLERANCE[self._dtype]:.0e}"
            )


@dataclass
class Submitted:
    """A batch that is being computed.

    Attributes:
        batch: its texts.
    """

    _encoder: Encoder
    batch: Batch
    _nonempty: NDArray[np.int64]
    _parts: list[Download]

    def result(self) -> NDArray[np.float32]:
        """The final vector of each text; waits for the device.

        In half precision a vector with a non-finite number is computed again in float32; one that stays non-finite is
        a row of NaN, and so is that of a text without tokens.

        Returns:
            (num_texts, dim) float32, in the batch's order.
        """
        return self._encoder.finished(self.batch, self._nonempty, self._parts)

    @property
    def seconds(self) -> float:
        """The device spent on it; known once ``result`` has returned."""
        return sum(part.seconds for part in self._parts)


@dataclass(frozen=True)
class _DeviceBatch:
    """A batch on the device. ``runs`` and ``max_seqlen`` stay on the host: the forward never waits for the device."""

    input_ids: Tensor
    cu_seqlens: Tensor
    segments: Segments
    runs: tuple[tuple[int, int], ...]
    max_seqlen: int

    @classmethod
    def of(cls, batch: Batch, transfer: Transfer) -> _DeviceBatch:
        num_tokens = batch.num_tokens
        blob = transfer.upload(np.concatenate([batch.input_ids, batch.cu_seqlens]))  # one copy for both
        cu_seqlens = blob[num_tokens:].contiguous()
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        positions = torch.arange(num_tokens, device=blob.device) - _spread(starts, lengths, num_tokens)
        runs = tuple((len(list(run)), length) for length, run in groupby(batch.lengths.tolist()))
        return cls(blob[:num_tokens].long(), cu_seqlens, Segments(starts, lengths, positions), runs, batch.max_seqlen)

    def position_ids(self, padding_idx: int | None) -> Tensor:
        """(T,) positions as the architecture counts them.

        With a `padding_idx` (RoBERTa and its relatives) they start behind it, and a padding token that was written in
        a text is skipped: the rule of transformers' ``create_position_ids_from_input_ids``.
        """
        if padding_idx is None:
            return self.segments.positions
        counted = (self.input_ids != padding_idx).long()
        running = counted.cumsum(0)
        before = (running - counted)[self.segments.starts]
        return (running - _spread(before, self.segments.lengths, len(counted))) * counted + padding_idx


def _spread(values: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """(n,) values a text to (T,) values a token; output_size saves a wait for the device."""
    return torch.repeat_interleave(values, lengths, output_size=num_tokens)


def _select(batch: Batch, indices: NDArray[np.int64]) -> Batch:
    """Some texts of a batch, in the order of `indices`."""
    if len(indices) == batch.num_texts:
        return batch
    return replace(pack(Tokens(batch.input_ids, batch.lengths), indices), texts=batch.texts[indices])


def _position_padding_idx(model: nn.Module) -> int | None:
    """The padding index that an architecture counts its positions from (RoBERTa's rule); None where they start at 0."""
    for module in model.modules():
        padding_idx = getattr(module, "padding_idx", None)
        if isinstance(padding_idx, int) and isinstance(getattr(module, "position_embeddings", None), nn.Embedding):
            return padding_idx
    return None


def _num_positions(model: nn.Module, padding_idx: int | None) -> int | None:
    """How many tokens a text may have before a learned position table ends; None without such a table."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding):
            return table.num_embeddings - (0 if padding_idx is None else padding_idx + 1)
    return None


def _probe_texts(words: list[str]) -> list[str]:
    """Texts of very different lengths out of a vocabulary's own words, so that every model sees many distinct tokens.

    Two of them have the same words in another order: equal lengths, so one dense call computes both.
    """
    rng = random.Random(0)
    texts = [rng.choices(words, k=count) for count in _PROBE_WORDS]
    return [" ".join(text) for text in (*texts, texts[3][::-1])]
