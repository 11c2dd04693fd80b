"""Hugging Face folders: the same logits as transformers' PyTorch models, exact round trips, errors that name things."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from grpo_jax.models import DecoderConfig, decoder, hub, load_pretrained, save_pretrained
from grpo_jax.models.decoder_config import ROPE_SCALINGS
from grpo_jax.options import OptionError, Precision
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from conftest import SETTINGS

TINY = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    rope_theta=500.0,
    max_position_embeddings=64,
)
LLAMA3 = ("llama3", 8.0, 1.0, 4.0, 16)
SCALING = dict(zip(ROPE_SCALINGS["llama3"], LLAMA3[1:], strict=True))
CONFIGS = {
    "tied": TINY,
    "untied_gqa": replace(TINY, tie_word_embeddings=False, num_key_value_heads=2, rms_norm_eps=1e-2),
    "bias": replace(TINY, attention_bias=True, num_key_value_heads=1, model_type="qwen2"),
    "llama3_rope": replace(TINY, rope_scaling=LLAMA3),
    "wide_heads": replace(TINY, head_dim=16, num_key_value_heads=2, tie_word_embeddings=False),
}


def random_params(config, seed=0):
    """Every leaf random, norms and biases included, so that a mixed-up pair of tensors shows."""
    shapes = jax.eval_shape(decoder(config).init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(rng.normal(0.3, 0.5, leaf.shape), leaf.dtype)
    return jax.tree.map(draw, shapes)


def logits_of(model, params, tokens, mask):
    def one(tokens_S, mask_S):
        return model.logits(params, model.prefill(params, tokens_S, mask_S)[0])

    return np.asarray(jax.vmap(one)(jnp.asarray(tokens), jnp.asarray(mask)))


def torch_logits(model, tokens, mask):
    """Left padding with explicit positions, as transformers wants it."""
    mask = torch.tensor(mask).long()
    with torch.no_grad():
        out = model(torch.tensor(tokens), attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    return out.logits.float().numpy()


def padded_batch(vocab_size, width=24, lengths=(24, 17, 1)):
    tokens = np.random.default_rng(1).integers(0, vocab_size, (len(lengths), width))
    return tokens, np.arange(width) >= width - np.array(lengths)[:, None]


def assert_same_logits(model, params, torch_model):
    tokens, mask = padded_batch(model.config.vocab_size)
    ours, theirs = logits_of(model, params, tokens, mask), torch_logits(torch_model, tokens, mask)
    assert np.abs(theirs[mask]).max() > 1
    np.testing.assert_allclose(ours[mask], theirs[mask], atol=2e-5, rtol=1e-5)


def assert_equal_trees(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


# --- what is saved ---


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_folder_is_read_back_exactly_and_by_transformers(name, tmp_path):
    config = CONFIGS[name]
    params = random_params(config)
    folder = save_pretrained(tmp_path / "new" / "model", config, params)
    assert folder == tmp_path / "new" / "model"
    model, loaded = load_pretrained(folder)
    assert replace(model.config, param_dtype=None) == config
    assert_equal_trees(loaded, params)
    peer, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(peer) is (Qwen2ForCausalLM if name == "bias" else LlamaForCausalLM)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_logits(model, loaded, peer)


def test_weights_keep_their_dtype_and_the_tied_head_is_left_out(tmp_path):
    config = replace(TINY, dtype="bfloat16")
    params = random_params(config)
    folder = save_pretrained(tmp_path / "model", config, params)
    tensors = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    assert "lm_head.weight" not in tensors
    assert LlamaForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    _, loaded = load_pretrained(folder, precision=Precision("bfloat16"))
    assert_equal_trees(loaded, params)


def test_weights_are_as_readable_as_the_configuration(tmp_path):
    folder = save_pretrained(tmp_path / "model", TINY, random_params(TINY))
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1


def test_tokenizer_files_and_special_ids_go_along(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ x }}"}
    files |= {"generation_config.json": '{"eos_token_id": [5, 6]}', "config.json": '{"eos_token_id": [5, 6]}'}
    for name, text in {**files, "training_log.txt": "not a tokenizer"}.items():
        (source / name).write_text(text)
    folder = save_pretrained(tmp_path / "model", TINY, random_params(TINY), source)
    assert {p.name for p in folder.iterdir()} == {*files, "model.safetensors"}
    assert all((folder / name).read_text() == text for name, text in files.items() if name != "config.json")
    settings = json.loads((folder / "config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"], settings["pad_token_id"]) == (None, [5, 6], None)


def test_special_ids_are_not_left_to_transformers_defaults(tmp_path):
    folder = save_pretrained(tmp_path / "model", TINY, random_params(TINY))
    peer = LlamaConfig.from_pretrained(folder)
    assert (peer.bos_token_id, peer.eos_token_id) == (None, None)


def test_source_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer: expected tokenizer\.json"):
        save_pretrained(tmp_path / "model", TINY, random_params(TINY), tmp_path)
    assert not (tmp_path / "model").exists()


def test_killed_save_leaves_no_folder_and_the_next_one_succeeds(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from grpo_jax.models import hub, load_pretrained, save_pretrained\n"
        "hub.save_file = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "model, params = load_pretrained(sys.argv[1])\n"
        "save_pretrained(sys.argv[2], model.config, params)\n"
    )
    params = random_params(TINY)
    first = save_pretrained(tmp_path / "first", TINY, params)
    folder = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", script, str(first), str(folder)], check=False)
    assert done.returncode == -9
    assert not folder.exists()
    assert list(tmp_path.glob(".killed*")), "the save was killed before it wrote anything"
    save_pretrained(folder, TINY, params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "killed"]
    assert_equal_trees(load_pretrained(folder)[1], params)


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        save_pretrained(tmp_path, TINY, random_params(TINY))
    with pytest.raises(FileExistsError, match="is not empty"):
        save_pretrained(tmp_path / "notes.txt", TINY, random_params(TINY))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_params_that_do_not_fit_are_named(tmp_path):
    params = random_params(TINY)
    params["layers"]["q"] = params["layers"]["q"][:, :, :5]
    del params["norm"]
    q = r"\['layers'\]\['q'\] has shape \(3, 32, 5\), expected \(3, 32, 32\)"
    with pytest.raises(ValueError, match=rf"{q}; \['norm'\] has shape None, expected \(32,\)"):
        save_pretrained(tmp_path / "model", TINY, params)


# --- what transformers saved ---


def peer_config(kind, **changes):
    fields = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return kind(**(fields | dict(num_key_value_heads=2, max_position_embeddings=64) | changes))


def peer_model(kind, config, seed=0):
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3, 0.5)
    return model


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_reads_what_transformers_saves_in_one_file_or_shards(shard_size, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 700.0, **SCALING}
    peer = peer_model(LlamaForCausalLM, peer_config(LlamaConfig, rope_parameters=rope))
    peer.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard_size == "20KB")
    model, params = load_pretrained(tmp_path)
    assert (model.config.rope_theta, model.config.rope_scaling) == (700.0, LLAMA3)
    assert not model.config.tie_word_embeddings
    assert_same_logits(model, params, peer)


def test_reads_qwen2_with_its_biases(tmp_path):
    peer = peer_model(Qwen2ForCausalLM, peer_config(Qwen2Config, tie_word_embeddings=True))
    peer.save_pretrained(tmp_path)
    model, params = load_pretrained(tmp_path)
    assert model.config.attention_bias
    assert_same_logits(model, params, peer)
    again = save_pretrained(tmp_path / "again", model.config, params)
    assert_same_logits(model, params, Qwen2ForCausalLM.from_pretrained(again))


def test_bfloat16_files_are_read_exactly_and_dtype_is_obeyed(tmp_path):
    peer = peer_model(LlamaForCausalLM, peer_config(LlamaConfig)).bfloat16()
    peer.save_pretrained(tmp_path)
    model, params = load_pretrained(tmp_path)
    assert model.config.dtype == "float32"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    expected = np.stack([layer.mlp.down_proj.weight.detach().float().numpy().T for layer in peer.model.layers])
    np.testing.assert_array_equal(params["layers"]["down"], expected)
    model, half = load_pretrained(tmp_path, precision=Precision("bfloat16"))
    assert model.config.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype("float32")), params, half)
    with pytest.raises(OptionError, match=r"params must be one of .*, got 'int8'"):
        load_pretrained(tmp_path, precision=Precision("int8"))


def test_no_torch_and_no_transformers_are_imported(tmp_path):
    folder = save_pretrained(tmp_path / "model", TINY, random_params(TINY))
    script = (
        "import sys; from grpo_jax.models import load_pretrained; load_pretrained(sys.argv[1]); "
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- config.json ---


def test_a_configuration_that_no_family_has_is_not_written(tmp_path):
    config = replace(TINY, attention_cap=3.0, norm_places="post")
    with pytest.raises(ValueError, match="no family of models has all features"):
        save_pretrained(tmp_path / "model", config, random_params(config))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1, 2]", "expected an object of settings, got list"),
        (b"null", "expected an object of settings"),
        (b'{"model_type": "llama", ', "is not whole JSON"),
        (b"", "is not whole JSON"),
        (b'{"model_type": "\xff\xfe"}', "is not UTF-8"),
        (json.dumps(SETTINGS | {"rope_theta": -1}).encode(), "rope_theta must be above 0"),
        (json.dumps(SETTINGS | {"rms_norm_eps": float("nan")}).encode(), "rms_norm_eps must be a finite number"),
    ],
)
def test_a_broken_configuration_is_named_with_its_file(text, message, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        load_pretrained(tmp_path)


def test_a_byte_order_mark_says_nothing(folder):
    config = folder / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert_equal_trees(load_pretrained(folder)[1], random_params(TINY))


# --- tensors and files ---


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(tmp_path / "model", TINY, random_params(TINY))


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


EMBED = "model.embed_tokens.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"tensor {Q} is missing"),
        (lambda t: t.update({Q: t[Q][:7]}), rf"tensor {Q} has shape \(7, 32\): expected \(32, 32\)"),
        (lambda t: t.update({Q: t[Q].astype(np.int8)}), rf"tensor {Q} is I8: expected unquantised floats"),
        (lambda t: t.update({"model.layers.3.a": t[Q], "z": t[Q]}), r"has no place for: model\.layers\.3\.a, z$"),
        (lambda t: t.update({f"t{i}": t[Q] for i in range(8)}), "t0, t1, t2, t3, t4 and 3 more"),
        (lambda t: t.update({"lm_head.weight": t[EMBED] + 1}), "though tie_word_embeddings is true"),
    ],
)
def test_tensors_that_do_not_match_are_named(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_tensors_that_change_nothing_may_stay(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors[EMBED]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit(folder, change)
    assert_equal_trees(load_pretrained(folder)[1], random_params(TINY))


def test_a_bias_on_the_output_of_attention_is_refused_unless_zero(tmp_path):
    folder = save_pretrained(tmp_path / "model", CONFIGS["bias"], random_params(CONFIGS["bias"]))
    name = "model.layers.2.self_attn.o_proj.bias"
    edit(folder, lambda tensors: tensors.update({name: np.zeros(32, np.float32)}))
    assert_equal_trees(load_pretrained(folder)[1], random_params(CONFIGS["bias"]))
    edit(folder, lambda tensors: tensors.update({name: tensors[name] + ml_dtypes.finfo("float32").tiny}))
    with pytest.raises(ValueError, match=f"tensor {name} is not zero"):
        load_pretrained(folder)


def test_cut_file_is_no_model(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        load_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"has no {name}; it holds \['"):
        load_pretrained(folder)


def test_missing_shard_is_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"has no model-00001-of-00002\.safetensors"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model.safetensors"}}, r"must name \.safetensors files of the same folder.*for a"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "files of the same folder"),
        ({"weight_map": {"a": "sub/x.safetensors"}}, "files of the same folder"),
        ({"weight_map": {"a": "sub\\x.safetensors"}}, "files of the same folder"),
        ({"weight_map": {"a": "..safetensors/.."}}, "files of the same folder"),
        ({"weight_map": {"a": ".hidden.safetensors"}}, "files of the same folder"),
        ({"weight_map": {"a": "model.bin"}}, "files of the same folder"),
        ({"weight_map": {"a": 3}}, "files of the same folder, got 3 for a"),
        ({"weight_map": {}}, "weight_map must be an object"),
        ({"weight_map": ["a"]}, "weight_map must be an object"),
        ({}, "weight_map must be an object"),
        ([], "weight_map must be an object"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(folder, index, message):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"index\.json.*{message}"):
        load_pretrained(folder)


# --- beside the source ---


@pytest.fixture
def source(tmp_path):
    """A folder as it comes from the Hub: with fields that no family reads, and templates of its own."""
    peer = peer_model(Qwen2ForCausalLM, peer_config(Qwen2Config, eos_token_id=[5, 6], tie_word_embeddings=True))
    peer.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text()) | {"initializer_range": 0.125}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    (tmp_path / "source" / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    return tmp_path / "source"


def test_the_source_config_goes_along_with_its_dtype_changed(source, tmp_path):
    model, params = load_pretrained(source, precision=Precision("bfloat16"))
    folder = save_pretrained(tmp_path / "saved", model, params, source)
    before, after = (json.loads((one / "config.json").read_text()) for one in (source, folder))
    assert after == before | {"dtype": "bfloat16"}
    assert (folder / "additional_chat_templates" / "tools.jinja").read_text() == "{{ x }}"
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_another_model_does_not_get_the_source_config(source, tmp_path):
    params = random_params(TINY)
    settings = json.loads((save_pretrained(tmp_path / "saved", TINY, params, source) / "config.json").read_text())
    assert (settings["model_type"], settings["hidden_size"], settings["num_hidden_layers"]) == ("llama", 32, 3)
    assert settings["eos_token_id"] == [5, 6]
    assert "initializer_range" not in settings


# --- the Hub ---


def test_hub_id_is_fetched_without_anything_else(folder, tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repo_id, allow_patterns):
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    _, params = load_pretrained("owner/tiny-1.5")
    assert_equal_trees(params, random_params(TINY))
    (folder / "tokenizer.json").write_text("{}")
    save_pretrained("copy", TINY, params, "owner/tiny-1.5")
    assert asked[0] == ("owner/tiny-1.5", ["config.json", "model*.safetensors", "model.safetensors.index.json"])
    assert asked[1][0] == "owner/tiny-1.5"
    assert "tokenizer.json" in asked[1][1]
    assert not any("safetensors" in pattern for pattern in asked[1][1])
    load_pretrained("copy")  # a relative folder
    assert len(asked) == 2


def test_folder_that_is_not_there_says_what_was_looked_for(monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"owner/name is not a folder here.*config\.json.*The Hub: no network"):
        load_pretrained("owner/name")
    for path in ("/no/such/folder", "./model", "model", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=rf"{path} is not a folder: expected a folder .*config\.json"):
            load_pretrained(path)
