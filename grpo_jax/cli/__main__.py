"""`python -m grpo_jax.cli` is `grpo-jax`."""

import sys

from grpo_jax.cli.entry import main

sys.exit(main())
