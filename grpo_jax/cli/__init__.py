"""grpo-jax train | eval | sample | plan: the command line.

Flags are the options of the library's own tuples, by their names. Left out on purpose: anything a
program could not do with the library; every command is a few calls of it.
"""

from grpo_jax.cli.entry import main as main
