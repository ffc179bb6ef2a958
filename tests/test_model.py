"""What a model folder says, and what is refused before a worker is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ModelError
from pipeline.model import open_model


@pytest.fixture
def folder(tmp_path: Path, model_dir: str) -> Path:
    """A copy of the real folder to be changed; the weights are linked."""
    target = tmp_path / "model"
    shutil.copytree(model_dir, target, ignore=shutil.ignore_patterns("model.safetensors"))
    (target / "model.safetensors").symlink_to(Path(model_dir) / "model.safetensors")
    return target


def put(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **values}))


def test_the_folder_is_read_without_loading_it(folder: Path) -> None:
    model = open_model(str(folder))
    assert [kind.rpartition(".")[2] for kind, _ in model.modules] == ["Transformer", "Pooling", "Normalize"]
    assert (model.max_length, model.document_prompt(None, None), model.query_prompt()) == (256, "", "")


@pytest.mark.parametrize(
    ("prompts", "default", "document", "query"),
    [
        ({}, None, "", ""),
        ({"query": "q: ", "document": "d: "}, None, "d: ", "q: "),
        ({"query": "q: "}, "query", "", "q: "),
        ({"passage": "p: "}, None, "", ""),
        ({"sts": "s: "}, "sts", "", ""),
    ],
)
def test_prompts_are_those_of_sentence_transformers(
    folder: Path, prompts: dict[str, str], default: str | None, document: str, query: str
) -> None:
    from sentence_transformers import SentenceTransformer

    put(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=default)
    model = open_model(str(folder))
    assert (model.document_prompt(None, None), model.query_prompt()) == (document, query)
    reference = SentenceTransformer(str(folder), device="cpu")
    text = ["a boat"]
    assert (reference.encode_document(text) == reference.encode([document + text[0]], prompt="")).all()
    assert (reference.encode_query(text) == reference.encode([query + text[0]], prompt="")).all()


def test_a_given_prompt_wins_and_an_unknown_name_is_refused(folder: Path) -> None:
    put(folder / "config_sentence_transformers.json", prompts={"query": "q: ", "clustering": "c: "})
    model = open_model(str(folder))
    assert model.document_prompt("mine: ", None) == "mine: "
    assert model.document_prompt(None, "clustering") == "c: "
    with pytest.raises(ModelError, match=r"--prompt-name clusterin: .* did you mean 'clustering'"):
        model.document_prompt(None, "clusterin")


@pytest.mark.parametrize(
    ("file", "values", "field"),
    [
        ("config.json", {"hidden_act": "relu"}, "model_modules"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "model_modules"),
        ("sentence_bert_config.json", {"max_seq_length": 16}, "model_modules"),
        ("tokenizer.json", {"truncation": None}, "model_tokenizer"),
        ("README.md", None, None),
        ("config_sentence_transformers.json", {"__version__": {}}, None),
    ],
)
def test_the_fingerprint_changes_with_what_changes_a_vector(
    folder: Path, file: str, values: dict[str, Any] | None, field: str | None
) -> None:
    before = open_model(str(folder)).fingerprint_fields()
    if values is None:
        (folder / file).write_text("other words")
    else:
        put(folder / file, **values)
    after = open_model(str(folder)).fingerprint_fields()
    assert [name for name in before if before[name] != after[name]] == ([field] if field else [])


def test_a_renamed_folder_keeps_its_fingerprint(folder: Path, model_dir: str) -> None:
    assert open_model(str(folder)).fingerprint_fields() == open_model(model_dir).fingerprint_fields()


def test_an_unknown_module_is_refused_by_name(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "9_Custom", "type": "my_package.MyHead"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"module my_package\.MyHead is not known"):
        open_model(str(folder))


def test_a_git_lfs_pointer_is_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelError, match=r"model\.safetensors is a Git LFS pointer"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (["model.safetensors"], "no weights"),
        (["config.json"], "no config.json"),
        (["tokenizer.json", "vocab.txt"], "no tokenizer"),
    ],
)
def test_a_missing_part_is_named(folder: Path, missing: list[str], expected: str) -> None:
    for name in missing:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=expected):
        open_model(str(folder))


def test_a_folder_of_another_kind_is_refused(folder: Path) -> None:
    put(folder / "config_sentence_transformers.json", model_type="CrossEncoder")
    with pytest.raises(ModelError, match="is a CrossEncoder"):
        open_model(str(folder))


@pytest.mark.parametrize(
    ("own", "tokenizer", "positions", "expected"),
    [(16, 512, 512, 16), (None, 1e30, 512, 512), (None, 128, 512, 128), (None, 1e30, None, None)],
)
def test_the_length_limit_is_found_as_sentence_transformers_does(
    folder: Path, own: int | None, tokenizer: float, positions: int | None, expected: int | None
) -> None:
    put(folder / "sentence_bert_config.json", max_seq_length=own)
    put(folder / "tokenizer_config.json", model_max_length=tokenizer)
    put(folder / "config.json", max_position_embeddings=positions)
    assert open_model(str(folder)).max_length == expected


def test_broken_json_names_the_file(folder: Path) -> None:
    (folder / "config.json").write_text("[{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        open_model(str(folder))


@pytest.mark.parametrize("content", [{"a": 1}, ["x"], [{"idx": 0}], "[{"])
def test_a_module_list_of_another_form_is_refused(folder: Path, content: Any) -> None:
    (folder / "modules.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=r"modules\.json: not a list of modules"):
        open_model(str(folder))


@pytest.mark.parametrize("kind", ["Router", "CNN", "LSTM", "StaticEmbedding", "WordWeights"])
def test_a_module_that_is_not_supported_is_named(folder: Path, kind: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    name = f"sentence_transformers.models.{kind}"
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 3, "name": "3", "path": "3", "type": name}]))
    with pytest.raises(ModelError, match=f"module {name} is not known; known: Transformer"):
        open_model(str(folder))


def test_a_chain_without_pooling_is_refused(folder: Path) -> None:
    (folder / "modules.json").write_text(json.dumps(json.loads((folder / "modules.json").read_text())[:1]))
    with pytest.raises(ModelError, match="chains Transformer; expected one Transformer first and one Pooling"):
        open_model(str(folder))
