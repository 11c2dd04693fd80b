"""Programs of the train step on eight simulated devices; prints one JSON row a program (see test_collectives.py)."""

import json
import re

import jax
import optax
from grpo_jax import assemble, grpo, init_state, make_train_step
from grpo_jax.models import DecoderConfig, decoder
from grpo_jax.options import Update
from grpo_jax.parallel.sharding import batch_shardings, gather, make_mesh, state_shardings
from grpo_jax.plan import hlo
from grpo_jax.training.batch import rollout_shapes

V, D = 1024, 64
P, G, S, T = 8, 2, 4, 12
CHUNK = 32  # tokens at once, of P · G · T: 6 chunks, and no other loop has as many steps
CHUNKS = P * G * T // CHUNK


def row(tied):
    mixed = {"dtype": "bfloat16", "param_dtype": "float32"}
    config = DecoderConfig(V, D, 96, 1, 4, 2, 16, tie_word_embeddings=tied, max_position_embeddings=64, **mixed)
    mesh = make_mesh(fsdp=8)
    model, objective, optimizer = decoder(config).with_gather(gather(mesh)), grpo(beta=0.0), optax.sgd(1.0)
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    rollout, reward = rollout_shapes(P, G, S, T), jax.ShapeDtypeStruct((P, G), "float32")
    batch = jax.eval_shape(lambda rollout, reward: assemble(objective, rollout, reward), rollout, reward)
    layout = state_shardings(mesh, model, optimizer, params)
    step = jax.jit(
        make_train_step(model, objective, optimizer, update=Update(logit_chunk=CHUNK)),
        in_shardings=(layout, batch_shardings(mesh, batch)),
        out_shardings=(layout, None),
    )
    text = step.lower(state, batch).compile().as_text()
    counts = hlo.count(text)
    loops = [name for name, trips in counts.loops.items() if trips == CHUNKS]
    states = [re.search(rf"%?{re.escape(name)} = (\(.*?\)) while\(", text)[1] for name in loops]
    return {
        "tied": tied,
        "loops": len(loops),
        "whole": sum(state.count(f"f32[{V},{D}]") + state.count(f"f32[{D},{V}]") for state in states),
        "parts": sum(state.count(f"f32[{V},{D // 8}]") + state.count(f"f32[{D // 8},{V}]") for state in states),
    }


if __name__ == "__main__":
    for tied in (True, False):
        print(json.dumps(row(tied)), flush=True)
