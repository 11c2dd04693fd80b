"""The benchmark's programs for a GPU that is not there: their shapes, and compiled where JAX has a plugin for CUDA."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from experiments.benchmark.workloads import SHAPES, WORKLOADS
from experiments.gpu_programs import described_gpu, workload_programs
from grpo_jax.models import DecoderConfig, decoder

ROOT = Path(__file__).resolve().parents[2]
plugin = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason='needs "jax[cuda13]"')


@pytest.mark.parametrize(("workload", "trained"), [("T1", 2), ("T3", 2), ("T4", 1)])
def test_programs_have_the_shapes_of_the_workload(workload, trained):
    model, work = decoder(DecoderConfig(**SHAPES["tiny"], dtype="bfloat16")), WORKLOADS[workload]
    sampler, update = workload_programs(model, work, jax.devices()[0])
    (_, state, batch, _), _ = update.args
    assert batch.rollout.tokens_PGT.shape == (trained, work.group_size, work.max_new_tokens)
    assert batch.rollout.prompts.tokens_PS.shape == (trained, work.prompt_length)
    assert (batch.samples.ref_logp_T is not None) == (work.beta > 0)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), update.out[0], state)
    assert jax.tree.all(same)
    assert sampler.out.tokens_PGT.shape == (work.prompts, work.group_size, work.max_new_tokens)


def test_without_the_plugin_it_says_how_to_get_it():
    def ask():
        raise RuntimeError("cuDNN is not detected.")

    with pytest.raises(ModuleNotFoundError, match=r'pip install "jax\[cuda13\]"'):
        described_gpu(ask)


@plugin
def test_compiled_with_attention_by_cudnn(tmp_path):
    path = tmp_path / "programs.json"
    command = ["-m", "experiments.gpu_programs", "--workloads", "T1,T4", "--shape", "tiny", "--json", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
    found = {(one["workload"], one["name"]): one for one in json.loads(path.read_text())}
    assert len(found) == 6
    for workload in ("T1", "T4"):
        # The prompt to itself, the group to its prompt, a completion to itself; `dots` computes them twice.
        assert found[workload, "train step"]["attention"] == [6, 3]
        assert found[workload, "train step, einsums"]["attention"] == [0, 0]
        assert found[workload, "sampler"]["temp_bytes"] > 0
