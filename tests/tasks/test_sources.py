"""Files of rows: every row with its line, read again from where it lies, and told where it is no row."""

import json
import random
import tracemalloc

import numpy as np
import pytest
from grpo_jax.tasks.data import load_task
from grpo_jax.tasks.rows import Index, Rows, row_hash
from grpo_jax.tasks.sources import Csv, JsonLines, JsonList, open_source

ROWS = [
    {"question": "1+1=", "answer": "2", "level": 1},
    {"question": "größer als 三?", "answer": None, "level": 2},
    {"question": 'a "quoted", word\nand a second line', "answer": "x\u2028y", "level": 3},
]


def right(completion, answer):
    return completion == answer


def rows_of(source):
    """The rows of a source as `Rows`, and their numbers; none may be bad."""
    index = Index()
    for one in source.scan():
        assert not one.problem, one
        index.add(one)
    return Rows(source, index.done(), np.arange(len(index)), dict), index.number_N.tolist()


def problems(source):
    return [(one.number, one.problem) for one in source.scan() if one.row is None]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n"])
def test_lines_of_json(tmp_path, newline, end):
    """With or without an end of line at the end, a mark at the beginning, and empty lines between."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    text = newline.join([lines[0], "", *lines[1:]]) + end.replace("\n", newline)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows, numbers = rows_of(JsonLines(path))
    assert list(rows) == ROWS
    assert numbers == [1, 3, 4]
    assert [rows[-1], rows[0]] == [ROWS[2], ROWS[0]], "read in any order"
    assert rows.place(1) == f"{path}, line 3"
    assert list(rows[1:]) == ROWS[1:]
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": 1', "is no JSON: Expecting ',' delimiter, column 8"),
        (b"[1, 2]", "must be an object with named values, got [1, 2]"),
        (b"null", "must be an object with named values, got null"),
        (b'{"a": "\xff"}', "is no UTF-8: invalid start byte"),
    ],
)
def test_a_line_that_is_no_row(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    assert problems(JsonLines(path)) == [(3, problem)]


@pytest.mark.parametrize(("suffix", "mark"), [(".csv", ","), (".tsv", "\t")])
def test_cells(tmp_path, suffix, mark):
    """A cell may hold marks, quotes and ends of lines; the number is that of the row's first line."""
    path = tmp_path / f"a{suffix}"
    lines = [["question", "answer"], ["1+1=", "2"], [f'"a{mark} ""b""\nc\x85d"', "3"], [], ["é", ""]]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(map(mark.join, lines)).encode())
    rows, numbers = rows_of(open_source(path, None, None))
    assert list(rows) == [
        {"question": "1+1=", "answer": "2"},
        {"question": f'a{mark} "b"\nc\x85d', "answer": "3"},
        {"question": "é", "answer": ""},
    ]
    assert numbers == [2, 3, 6]


def test_cells_that_are_no_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n3\n4,5,6\n7,8\n"9,10\n')
    assert problems(Csv(path)) == [
        (3, "has 1 cells, and there are 2 columns"),
        (4, "has 3 cells, and there are 2 columns"),
        (6, "unexpected end of data"),
    ]
    path.write_text("a,a\n1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 1 must hold the names of the columns, each once"):
        list(Csv(path).scan())


def test_a_list_of_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=1))
    rows, numbers = rows_of(JsonList(path))
    assert list(rows) == ROWS
    assert numbers == [2, 7, 12], "where each object begins"
    path.write_text(json.dumps({"info": 3, "test": ROWS[:1], "train": [*ROWS[1:], 7]}, indent=2))
    assert list(rows_of(JsonList(path, "test"))[0]) == ROWS[:1]
    assert problems(JsonList(path)) == [(21, "must be an object with named values, got 7")]
    assert path.read_text().splitlines()[20].strip() == "7"
    with pytest.raises(ValueError, match=r"has the splits test, train, and 'tset' is asked for"):
        JsonList(path, "tset")
    path.write_text('[{"a": 1},\n{"a": }]')
    with pytest.raises(ValueError, match=r"a\.json, line 2: Expecting value"):
        JsonList(path)


def test_tables_of_datasets(tmp_path):
    """Parquet, a folder that was saved, with splits or without, and a folder of files give the same rows."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("a.parquet", "saved", "splits", "files"):
        rows, numbers = rows_of(open_source(tmp_path / name, None, None))
        assert list(rows) == ROWS, name
        assert numbers == [1, 2, 3]
        assert type(rows[0]["question"]) is str
    assert list(rows_of(open_source(tmp_path / "splits", "test", None))[0]) == [ROWS[1]]
    with pytest.raises(ValueError, match=r"splits has the splits train, test, and 'dev' is asked for"):
        open_source(tmp_path / "splits", "dev", None)


@pytest.mark.parametrize(
    ("name", "split", "subset", "message"),
    [
        ("b.jsonl", None, None, r"there is no file .*b\.jsonl; did you mean .*a\.jsonl\?"),
        ("a.txt", None, None, r"a\.txt must end in one of \.jsonl"),
        ("a.jsonl", "test", None, r"a\.jsonl has no splits, and the split 'test' is asked for"),
        ("a.jsonl", None, "main", r"a\.jsonl has no subsets, and 'main' is asked for"),
    ],
)
def test_what_cannot_be_opened(tmp_path, name, split, subset, message):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_source(tmp_path / name, split, subset)


def test_the_hash_of_a_row_knows_values_only():
    assert row_hash({"a": 1, "b": [1, {"c": None}]}) == row_hash({"b": [1, {"c": None}], "a": 1})
    assert row_hash({"a": 1}) != row_hash({"a": "1"}) != row_hash({"a": 2})
    # printf '{"answer":"2","question":"1+1="}' | b2sum -l 64
    assert row_hash({"question": "1+1=", "answer": "2"}) == 0xBFAFC7398A7D4B25


def test_a_row_that_has_changed_is_told(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows, _ = rows_of(JsonLines(path))
    path.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    assert rows[0] == {"a": 1}, "what was added later changes nothing"
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 has changed since the file was opened"):
        rows[1]
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 cannot be read any more"):
        rows[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_large_file_is_not_in_memory(tmp_path, suffix):
    """Of 4000 rows of 4 kB less than a twentieth stays: where each lies, and its hash."""
    path = tmp_path / f"a{suffix}"
    with open(path, "w") as file:
        file.write("" if suffix == ".jsonl" else "question,answer\n")
        for i in range(4000):
            text = f"{i} " + "x" * 4000
            row = {"question": text, "answer": str(i)}
            file.write(json.dumps(row) + "\n" if suffix == ".jsonl" else f"{text},{i}\n")
    tracemalloc.start()
    task = load_task(path, reward=right)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < path.stat().st_size / 20
    assert peak < path.stat().st_size / 10
    order = random.Random(0).sample(range(len(task.train)), 50)
    assert all(task.train[i]["question"].startswith(f"{task.train[i]['answer']} x") for i in order)
