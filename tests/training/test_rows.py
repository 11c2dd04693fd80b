"""Which rows come when: each once an epoch, in an order of the seed, from a place that a run keeps and refills move."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from grpo_jax.inference.tokenizer import ByteTokenizer
from grpo_jax.parallel.backends import SINGLE
from grpo_jax.tasks import Task, load_task
from grpo_jax.training import loop, rows
from grpo_jax.training.rows import measured, prompt_width, row_indices
from grpo_jax.training.sft import sft

from toy import ascii_share, bigram
from training.toy_run import BATCHING, SEED, SGD, P, copied, kept, params, run, stages_of, timeless

BYTES = ByteTokenizer()


class Endless(Sequence):
    """Rows that are made when they are asked for; remembers which were."""

    endless = True

    def __init__(self, count=2**31 - 1):
        self.count = count
        self.asked = []

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        if not 0 <= place < self.count:
            raise IndexError(place)
        self.asked.append(place)
        return {"question": f"{place:010d}", "answer": "abc"}


def endless_task():
    held_out = [{"question": "held", "answer": "a"}]
    ask = lambda row: [{"role": "user", "content": row["question"]}]
    return Task("endless", Endless(), held_out, ask, ascii_share, lambda row: row["answer"] * 3)


@pytest.fixture
def file_task(tmp_path):
    """A task of a file: its rows are read when they are asked for."""
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps({"question": f"{'abcdefgh'[i % 8]}{i}"}) + "\n" for i in range(24)))
    task = load_task(path, reward=ascii_share, eval_share=0.4, target="question")
    assert 5 < len(task.train) < 20
    return task


def test_endless_rows_come_one_after_another():
    """From a place of the seed: they are random as they are, and neighbours are made together."""
    count = 2**31 - 1
    first = row_indices(0, 8, count, 3, endless=True)
    assert np.diff(first).tolist() == [1] * 7
    assert first[0] % 100 == 0
    assert row_indices(5, 3, count, 3, endless=True).tolist() == first[5:].tolist()
    assert first[0] != row_indices(0, 1, count, 4, endless=True)[0]
    assert row_indices(count - 2, 4, count, 3, endless=True).tolist() == [first[0] - 2, first[0] - 1, *first[:2]]


def test_an_order_is_not_shared_by_what_changes_it():
    """It is kept between calls, and what it gives is the caller's own."""
    found = row_indices(0, 6, 6, 1)
    found[:] = 0
    assert sorted(row_indices(0, 6, 6, 1)) == list(range(6))


def test_lengths_of_many_rows_are_taken_from_some(monkeypatch):
    task = endless_task()
    some, margin = measured(task.train)
    assert len(list(some)) == rows.FEW
    assert (margin, prompt_width(task, BYTES)) == (1.25, 16), "11 tokens, a quarter more"
    assert measured([1, 2]) == ([1, 2], 1.0)
    many = range(rows.MANY + 7)
    chosen, margin = measured(many)
    chosen = list(chosen)
    assert (len(chosen), len(set(chosen)), margin) == (rows.MANY, rows.MANY, 1.25)
    assert (chosen[0], chosen[-1]) == (0, len(many) - 2)


def test_an_endless_task_is_trained_on():
    """By its own rows, of which few are made."""
    task = endless_task()
    stages = stages_of(task=task)
    done = kept(run(stages, steps=2))
    seen = [row["prompt"] for _, metrics in done for row in metrics["completions"]]
    expected = [f"{i:010d}" for i in row_indices(0, 2 * P, len(task.train), SEED, endless=True)]
    assert list(dict.fromkeys(seen)) == expected
    assert len(set(task.train.asked)) == len(expected), "the width is given"
    updates = sft(bigram(), params(), task, BYTES, SGD, steps=1, batch_size=4, seed=SEED)
    assert [metrics["iteration"] for _, metrics in updates] == [1]


def test_rows_of_a_file_are_trained_on_as_those_of_a_list(file_task):
    listed = file_task._replace(train=list(file_task.train), held_out=list(file_task.held_out))
    whole, other = (kept(run(stages_of(task=task), steps=3)) for task in (file_task, listed))
    assert [timeless(metrics) for _, metrics in whole] == [timeless(metrics) for _, metrics in other]


def test_every_row_once_an_epoch_though_refills_take_some(file_task):
    """Dynamic sampling takes further batches from the same place: no row comes twice, none is left out."""
    count = len(file_task.train)
    taken = []
    stages = stages_of(task=file_task)

    def prompts(data):
        found = stages.prompts(data)
        taken.extend(np.asarray(found[1]).tolist())
        return found

    def refilled(stages, weights, rollout, more, data, **options):
        for _ in range(2):
            _, data = more(data)
        return loop.collect(stages, weights, rollout, more, data, **options)

    done = kept(run(stages._replace(prompts=prompts), steps=4, collect=refilled))
    assert len(taken) == 4 * 3 * P
    assert int(done[-1][0].data["position"]) == len(taken)
    whole = len(taken) // count
    assert whole >= 2
    for epoch in range(whole):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_run_that_refills_is_resumed_bit_for_bit(file_task):
    def refilled(stages, weights, rollout, more, data, **options):
        _, data = more(data)
        return loop.collect(stages, weights, rollout, more, data, **options)

    whole = kept(run(stages_of(task=file_task), steps=4, collect=refilled))
    rest = kept(run(stages_of(task=file_task), copied(whole[1][0]), steps=4, collect=refilled))
    assert [timeless(m) for _, m in rest] == [timeless(m) for _, m in whole[2:]]
    assert rest[-1][0].data == whole[-1][0].data


def test_every_process_takes_its_part_of_one_order(file_task):
    """Of two processes each reads the rows of its own prompts; together they are those of one."""

    class Part:
        def __init__(self, local):
            self.local = local

        def local_rows(self, size):
            return np.arange(size)[self.local]

        def put_rows(self, prompts):
            return prompts

        def put(self, kind, row_P):
            return row_P

    def taken(devices, batching):
        options = (file_task, BYTES, 259, batching, SEED, devices)
        return rows.next_prompts(*options, {"position": np.int64(7)})

    batching = BATCHING._replace(prompts_per_step=4)
    whole, row_P, data = taken(SINGLE, batching)
    parts = [taken(Part(local), batching) for local in (slice(0, 2), slice(2, 4))]
    np.testing.assert_array_equal(np.concatenate([part[0].tokens_PS for part in parts]), whole.tokens_PS)
    for _, own, after in parts:
        np.testing.assert_array_equal(own, row_P)
        assert after == data
