"""grpo-jax sample: a run's answers to a question."""

import dataclasses
from typing import Annotated

import tyro

from grpo_jax.config import Flat
from grpo_jax.options import OptionError, Sampling, whole


@dataclasses.dataclass(frozen=True)
class Sample:
    """Answer a question of yours with a run's policy."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    text: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEXT")]
    """The question."""
    checkpoint: int | None = None
    """The iteration of the checkpoint; None takes the newest."""
    number: int = 1
    """How many answers to give."""
    sampling: Annotated[Sampling, Flat] = Sampling(temperature=0.0)
    max_new_tokens: int | None = None
    """The length limit of an answer, in tokens; None takes that of the run."""
    seed: int = 0
    """The seed of the sampling."""
    json: bool = False
    """Print the answers as one JSON object."""


def sample(command: Sample) -> None:
    import jax

    from grpo_jax.inference.generate import generate
    from grpo_jax.inference.logprobs import with_vocabulary
    from grpo_jax.inference.text import completion_texts
    from grpo_jax.inference.tokenizer import pad_prompts
    from grpo_jax.options import Generation
    from grpo_jax.runs import run
    from grpo_jax.runs.folder import json_text

    whole("number", command.number, 1)
    whole("max_new_tokens", command.max_new_tokens, 1, or_none=True)
    if command.sampling.check().temperature == 0 and command.number > 1:
        raise OptionError("number", "above 1 needs a temperature above 0: greedy answers are equal")
    opened = run.open_run(command.run, command.checkpoint)
    tokenizer = opened.components.tokenizer
    ids = tokenizer.render([{"role": "user", "content": command.text}])
    length = command.max_new_tokens or opened.config.generation.max_new_tokens
    rollout = generate(
        with_vocabulary(opened.components.model, tokenizer.vocab_size),
        opened.params,
        pad_prompts([ids], tokenizer.pad_id),
        jax.random.key(command.seed),
        generation=Generation(command.number, length, command.sampling),
        stop_ids=tokenizer.stop_ids,
        pad_id=tokenizer.pad_id,
    )
    texts = completion_texts(tokenizer, rollout)[0]
    answers = {"question": command.text, "answers": texts}
    print(json_text(answers) if command.json else "\n".join(texts))
