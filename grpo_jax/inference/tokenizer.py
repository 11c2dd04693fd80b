"""Text to token ids and back: bytes, Hugging Face tokenizers, and the left padding of prompts.

A tokenizer is anything with the members of `Tokenizer`. Prompts go from messages to ids once, in
`render`, and are never decoded and encoded again; completions go from ids to text once, in
`decode`, for the rewards. Left out on purpose: truncation. A prompt that does not fit is an error
that names it, because a shortened question is another question.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from grpo_jax.types import Prompts

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant", "content": text}

CHAT_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|end|>",
)


@runtime_checkable
class Tokenizer(Protocol):
    """What the library asks of a tokenizer.

    `encode` adds no special tokens, `decode` drops them and stops at nothing, `render` gives the
    ids of a chat that the assistant continues. `stop_ids` are all ids that end a completion, not
    just one of them.
    """

    vocab_size: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def render(self, messages: Sequence[Message]) -> list[int]: ...


class ByteTokenizer:
    """UTF-8 bytes and three specials: 256 pads, 257 ends an assistant's message, 258 ends anybody
    else's.

    A chat is its contents in order, each closed by its special; roles other than the assistant's
    look alike.
    """

    pad_id = 256
    end_id = 257
    separator_id = 258
    vocab_size = 259
    stop_ids = (257,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes among `ids`; bytes that are no UTF-8, as in a cut character, become
        U+FFFD.
        """
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def render(self, messages: Sequence[Message]) -> list[int]:
        messages = _checked(messages)
        ids: list[int] = []
        for message in messages:
            ids += self.encode(message["content"])
            ids.append(self.end_id if message["role"] == "assistant" else self.separator_id)
        return ids[:-1] if _is_prefill(messages) else ids


class HFTokenizer:
    """A Hugging Face tokenizer, from a folder or a Hub id; needs `transformers` but no PyTorch.

    `stop_ids` gathers every id that ends a completion: `eos_token_id` (one or several) of
    generation_config.json and config.json, the tokenizer's own, and the chat-end tokens in its
    vocabulary. Nothing else is read from the generation config: its top-k, top-p and temperature
    would change sampling behind the caller's back. `end_id` is the one of them that the template
    writes after an assistant's message. Without a padding token a stop id pads; masks come from
    lengths, so this is safe.
    """

    def __init__(
        self,
        path_or_id: str | Path,
        *,
        template_args: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ):
        from transformers import AutoTokenizer  # seconds to import, so only where it is used

        try:
            self.inner = AutoTokenizer.from_pretrained(str(path_or_id), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no tokenizer at {str(path_or_id)!r}: expected a folder with tokenizer.json "
                f"and tokenizer_config.json, or the id of a model on the Hugging Face Hub ({error})"
            ) from error
        self.vocab_size = len(self.inner)
        self.stop_ids = _stop_ids(self.inner, str(path_or_id))
        pad_id = self.inner.pad_token_id
        self.pad_id = self.stop_ids[0] if pad_id is None else pad_id
        self._bos_id = _leading_bos(self.inner)
        self._template_args = dict(template_args or {})
        if isinstance(self.inner.chat_template, str):
            today = date or datetime.date.today()
            self.inner.chat_template = with_date(self.inner.chat_template, today)
        self.end_id = self._end_of_turn()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        # Cleaning up spaces would change text that a reward compares.
        return self.inner.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The chat template with the assistant's opening, or the bare contents, one a line, where
        there is none.

        A template writes its own special tokens, BOS included, so none is added to it. Bare text
        starts with exactly one BOS where the tokenizer would add it.
        """
        messages = _checked(messages)
        if self.inner.chat_template is not None:
            return self.encode(self._template(messages))
        ids = self.encode("\n".join(message["content"] for message in messages))
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids = [self._bos_id, *ids]
        return ids

    def _template(self, messages: Sequence[Message]) -> str:
        prefill = _is_prefill(messages)
        try:
            return self.inner.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=not prefill,
                continue_final_message=prefill,
                **self._template_args,
            )
        except Exception as error:  # whatever a template raises: jinja's errors, or its own
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"the chat template refuses messages of the roles {roles}: {error}"
            ) from error

    def _end_of_turn(self) -> int:
        """The stop token that the template writes after an assistant's message.

        Without a template it is the tokenizer's own end of text.
        """
        text = "x"
        if self.inner.chat_template is not None:
            try:
                turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
                written = self.inner.apply_chat_template(
                    turns, tokenize=False, **self._template_args
                )
                after = self.encode(written[written.rindex(text) + 1 :])
                return next(token for token in after if token in self.stop_ids)
            except Exception:  # a template that closes no turn, or wants other roles
                pass
        own = self.inner.eos_token_id
        return own if own in self.stop_ids else self.stop_ids[0]


def with_date(template: str, date: datetime.date) -> str:
    """A chat template that is told a day: one that writes today's would ask otherwise tomorrow."""

    def written(call: re.Match) -> str:
        return repr(date.strftime(call["format"]))

    return re.sub(r"strftime_now\(\s*(['\"])(?P<format>.*?)\1\s*\)", written, template)


def load_tokenizer(
    path_or_id: str | Path,
    *,
    template_args: Mapping[str, Any] | None = None,
    date: datetime.date | None = None,
) -> Tokenizer:
    """`"bytes"` is the `ByteTokenizer`; anything else a Hugging Face tokenizer.

    Args:
      path_or_id: a folder or Hub id.
      template_args: what the chat template takes besides messages, such as `enable_thinking`.
      date: what the template is told to be today; None: the day on which it is loaded.
    """
    if str(path_or_id) == "bytes":
        return ByteTokenizer()
    return HFTokenizer(path_or_id, template_args=template_args, date=date)


def pad_prompts(
    ids_list: Sequence[Sequence[int]], pad_id: int, *, length: int | None = None, multiple: int = 16
) -> Prompts:
    """Left-pads prompts to one width S: `length`, or the longest rounded up to a `multiple` (few
    compiled shapes).

    Returns NumPy arrays. The mask comes from lengths, so a real token equal to `pad_id` stays real.
    Raises ValueError, naming the row, for an empty prompt and for one longer than `length`.
    """
    if not ids_list:
        raise ValueError("no prompts: expected at least one list of token ids")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    if length is not None and length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    longest = max(len(ids) for ids in ids_list)
    width = -(-longest // multiple) * multiple if length is None else length
    tokens_PS = np.full((len(ids_list), width), pad_id, np.int32)
    mask_PS = np.zeros((len(ids_list), width), bool)
    for row, ids in enumerate(ids_list):
        if not len(ids):
            raise ValueError(f"prompt {row} is empty: there is no token to continue from")
        if len(ids) > width:
            raise ValueError(
                f"prompt {row} has {len(ids)} tokens, more than the {width} allowed; it is not "
                "shortened"
            )
        tokens_PS[row, width - len(ids) :] = ids
        mask_PS[row, width - len(ids) :] = True
    return Prompts(tokens_PS, mask_PS)


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages, with their contents as text."""
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError(
            f'messages must be a non-empty list of {{"role", "content"}}, got {messages!r}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f'message {index} must have the keys "role" and "content", got {message!r}'
            )
    return [dict(message) | {"content": message_text(message)} for message in messages]


def message_text(message: Message) -> str:
    """A message's content as text: a string, or a list of parts `{"type": "text", "text": …}`."""
    content = message["content"]
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = [part for part in content if isinstance(part, Mapping)]
        if len(parts) == len(content) and all(part.get("type") == "text" for part in parts):
            return "".join(part["text"] for part in parts)
    raise ValueError(
        f"the content of a message must be text, or a list of text parts, got {content!r}"
    )


def _is_prefill(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer, to be continued."""
    return messages[-1]["role"] == "assistant"


def _leading_bos(inner) -> int | None:
    """The BOS id, if this tokenizer puts it before plain text when asked for special tokens."""
    ids = inner.encode("a", add_special_tokens=True)
    return (
        inner.bos_token_id
        if inner.bos_token_id is not None and ids[:1] == [inner.bos_token_id]
        else None
    )


def _stop_ids(inner, path_or_id: str) -> tuple[int, ...]:
    vocabulary = inner.get_vocab()
    found = {vocabulary[token] for token in CHAT_ENDS if token in vocabulary}
    for ids in (
        inner.eos_token_id,
        _read_json(path_or_id, "generation_config.json").get("eos_token_id"),
        _read_json(path_or_id, "config.json").get("eos_token_id"),
    ):
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise ValueError(
            f"the tokenizer at {path_or_id!r} names no token that ends a completion: "
            "set eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))


def _read_json(path_or_id: str, name: str) -> dict:
    """A JSON file of a model folder or Hub id; empty where there is none."""
    from transformers.utils import cached_file

    path = cached_file(
        path_or_id,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
