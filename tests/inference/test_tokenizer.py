"""Tokenizers: every stop id, one BOS, nothing truncated, padding that never decides what is real."""

import json

import numpy as np
import pytest
from grpo_jax.inference.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer, pad_prompts
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

BOS, EOS, IM_END, PAD, EXTRA = range(256, 261)
SPECIALS = ["<s>", "</s>", "<|im_end|>", "<pad>", "<|stop|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = [{"role": "user", "content": "3 days?"}]


@pytest.fixture
def folder(tmp_path):
    """Writes a byte-level tokenizer with the given settings and returns its folder."""

    def write(*, specials=SPECIALS, adds_bos=True, generation=None, config=None, **settings):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens(specials)
        if adds_bos:
            raw.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
            )
        raw.save(str(tmp_path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | settings
        files = {"tokenizer_config": settings, "generation_config": generation, "config": config}
        for name, content in files.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "Zürich: 3 × $7 = $21 − ok 🚲"
    ids = tokenizer.encode(text)
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert isinstance(tokenizer, Tokenizer)


def test_bytes_decode_drops_specials_and_stops_at_nothing():
    tokenizer = ByteTokenizer()
    ids = [tokenizer.pad_id, *b"ab", tokenizer.end_id, *b"cd", tokenizer.separator_id]
    assert tokenizer.decode(ids) == "abcd"
    assert tokenizer.decode(np.array(ids, np.int32)) == "abcd"
    assert tokenizer.decode("ü".encode()[:1]) == "\ufffd"


def test_bytes_render_closes_every_message():
    tokenizer = ByteTokenizer()
    sep, end = tokenizer.separator_id, tokenizer.end_id
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.render(chat) == [97, sep, 98, end, 99, sep]
    assert {sep, end, tokenizer.pad_id} == {256, 257, 258}
    assert tokenizer.vocab_size == 259
    assert tokenizer.stop_ids == (end,)


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user", "content": "a"}, [{"content": "a"}], ["hello"]])
def test_render_refuses_what_is_no_chat(messages):
    with pytest.raises(ValueError, match="role"):
        ByteTokenizer().render(messages)


def test_template_gives_the_assistants_opening_and_one_bos(folder):
    tokenizer = HFTokenizer(folder(chat_template=TEMPLATE))
    ids = tokenizer.render(QUESTION)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert EOS not in ids
    text = "user: 3 days?"
    assert ids == [BOS, *tokenizer.encode(text), IM_END, *tokenizer.encode("assistant:")]
    assert isinstance(tokenizer, Tokenizer)


def test_template_without_bos_gets_none(folder):
    tokenizer = HFTokenizer(folder(chat_template=TEMPLATE.replace("{{ bos_token }}", "")))
    assert BOS not in tokenizer.render(QUESTION)


@pytest.mark.parametrize("content", ["3 days?", "<s>3 days?"])
def test_bare_text_has_one_bos_where_the_tokenizer_adds_it(folder, content):
    tokenizer = HFTokenizer(folder())
    assert tokenizer.render([{"role": "user", "content": content}]) == [BOS, *tokenizer.encode("3 days?")]


def test_bare_text_has_no_bos_where_the_tokenizer_adds_none(folder):
    tokenizer = HFTokenizer(folder(adds_bos=False))
    assert tokenizer.render(QUESTION) == tokenizer.encode("3 days?")


def test_encode_adds_nothing_and_decode_drops_specials(folder):
    tokenizer = HFTokenizer(folder())
    text = "a , b ' s Zürich"  # spaces that a clean-up would remove
    ids = tokenizer.encode(text)
    assert not set(ids) & {BOS, EOS}
    assert tokenizer.decode([BOS, *ids, EOS, *tokenizer.encode("!"), PAD]) == text + "!"


def test_stop_ids_come_from_every_source(folder):
    path = folder(
        generation={"eos_token_id": [EXTRA, 7], "top_k": 50}, config={"model_type": "llama", "eos_token_id": 9}
    )
    assert HFTokenizer(path).stop_ids == tuple(sorted({EOS, IM_END, EXTRA, 7, 9}))


def test_a_single_stop_id_of_the_generation_config_counts(folder):
    assert EXTRA in HFTokenizer(folder(generation={"eos_token_id": EXTRA})).stop_ids


def test_no_stop_token_is_an_error(folder):
    path = folder(specials=["<s>"], adds_bos=False, eos_token=None)
    with pytest.raises(ValueError, match="ends a completion"):
        HFTokenizer(path)


def test_padding_token_or_a_stop_id(folder):
    assert HFTokenizer(folder(pad_token="<pad>")).pad_id == PAD
    unpadded = HFTokenizer(folder())
    assert unpadded.pad_id in unpadded.stop_ids
    assert unpadded.vocab_size == 256 + len(SPECIALS)


def test_load_tokenizer(folder, tmp_path):
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    assert isinstance(load_tokenizer(folder()), HFTokenizer)
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "absent")


def test_padding_is_left_and_from_lengths():
    pad = 5
    prompts = pad_prompts([[1, 2, 3], [pad, pad]], pad, multiple=4)
    assert prompts.tokens_PS.dtype == np.int32
    assert prompts.mask_PS.dtype == bool
    assert prompts.tokens_PS.tolist() == [[pad, 1, 2, 3], [pad, pad, pad, pad]]
    assert prompts.mask_PS.tolist() == [[False, True, True, True], [False, False, True, True]]


@pytest.mark.parametrize(("longest", "width"), [(1, 16), (16, 16), (17, 32)])
def test_width_is_rounded_up(longest, width):
    assert pad_prompts([[1] * longest, [1]], 0).tokens_PS.shape == (2, width)


def test_width_can_be_given():
    assert pad_prompts([[1, 2]], 0, length=5).tokens_PS.tolist() == [[0, 0, 0, 1, 2]]


def test_a_long_prompt_is_named_not_shortened():
    with pytest.raises(ValueError, match="prompt 1 has 6 tokens, more than the 5"):
        pad_prompts([[1], [1] * 6], 0, length=5)


@pytest.mark.parametrize(
    ("ids_list", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1]], {"multiple": 0}, "multiple"),
        ([[1]], {"length": 0}, "length"),
    ],
)
def test_bad_padding_arguments(ids_list, options, message):
    with pytest.raises(ValueError, match=message):
        pad_prompts(ids_list, 0, **options)
