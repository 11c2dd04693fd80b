"""What is known of the arguments before they are parsed: the model, a plan's slice, TRL's names."""

from collections.abc import Collection
from typing import Any

from grpo_jax.named_options import flag

# What TRL calls an option, and what it is called here.
TRL_NAMES = {
    "num_generations": "--group-size",
    "max_completion_length": "--max-new-tokens",
    "max_prompt_length": "--prompt-length",
    "per_device_train_batch_size": "--prompts-per-step (prompts, not completions)",
    "generation_batch_size": "--prompts-per-step (prompts, not completions)",
    "gradient_accumulation_steps": "--microbatches",
    "num_iterations": "--epochs",
    "beta": "--objective-args beta=…",
    "epsilon": "--objective-args low=… high=…",
    "epsilon_high": "--objective-args high=…",
    "loss_type": "--objective",
    "scale_rewards": "--objective (dr_grpo, lite_ppo and others scale otherwise)",
    "importance_sampling_level": "--objective (gspo has a ratio of the whole sequence)",
    "reward_weights": "--weights",
    "max_steps": "--steps",
    "num_train_epochs": "--steps (iterations)",
    "save_steps": "--save-every",
    "eval_steps": "--eval-every",
    "save_total_limit": "--keep-checkpoints",
    "per_device_eval_batch_size": "--eval-batch-size",
    "warmup_steps": "--lr-warmup",
    "lr_scheduler_type": "--schedule",
    "max_grad_norm": "--clip-norm",
    "output_dir": "--out",
    "resume_from_checkpoint": "--resume",
    "model_name_or_path": "--model",
    "dataset_name": "--data",
    "dataset_config": "--subset",
    "dataset_train_split": "--split",
    "dataset_test_split": "--eval-split",
    "reward_funcs": "--reward",
    "sync_ref_model": "--ref-every or --ref-ema",
    "ref_model_sync_steps": "--ref-every",
    "ref_model_mixup_alpha": "--ref-ema",
    "gradient_checkpointing": "--remat",
    "bf16": "--compute-dtype bfloat16",
    "torch_dtype": "--param-dtype and --compute-dtype",
    "num_completions_to_print": "--log-completions",
    "steps_per_generation": "--epochs or --max-staleness",
}


def given_model(arguments: list[str], usual: str) -> str:
    """The --model among the arguments: what the other options' defaults depend on."""
    return given_value(arguments, "model", usual)


def given_slice(arguments: list[str]) -> dict[str, Any]:
    """What the defaults of a plan depend on besides the model, where it is among the arguments."""
    if arguments[:1] != ["plan"]:
        return {}
    names = ("topology", "mesh", "microbatches")
    found = {name: given_value(arguments, name, None) for name in names}
    if (cuts := found.pop("microbatches")) and cuts.isdecimal():
        found["microbatches"] = int(cuts)
    return {name: value for name, value in found.items() if value}


def given_value(arguments: list[str], option: str, usual: str | None) -> str | None:
    """The text that is given for an option, before the arguments are parsed."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag(option):
            return value if equals else next(iter(arguments[place + 1 :]), usual)
    return usual


def check_trl_names(arguments: list[str], known: Collection[str]) -> None:
    """Raises ValueError for an option by TRL's name, with the name that it has here.

    `known` are the options that have that name here too.
    """
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in TRL_NAMES and name not in known:
            raise ValueError(
                f"{flag(name)} is TRL's name of an option; did you mean {TRL_NAMES[name]}?"
            )
