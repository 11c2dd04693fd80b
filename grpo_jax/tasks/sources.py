"""Files of rows: where each row begins, and reading one when it is asked for.

A source is gone through once, from its beginning (see `rows` for what is kept of it). JSONL and CSV
files may be larger than memory, as may what `datasets` maps into it. Left out on purpose: writing,
and any meaning of the columns (see `data`).
"""

import csv
import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from grpo_jax.tasks.task import Row

FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
LARGEST_FIELD = 2**31 - 1  # of a CSV file, in characters


class Found(NamedTuple):
    """One row of a source: its line or number, where it lies, and what it holds or what is wrong.

    `start` and `size` are bytes of a file, or a place in a list.
    """

    number: int
    start: int
    size: int
    row: Row | None
    problem: str = ""


class Source(Protocol):
    """Rows that lie somewhere: `name` and `unit` tell where, as in FILE, line 7."""

    name: str
    unit: str

    def scan(self) -> Iterator[Found]: ...

    def read(self, start: int, size: int) -> Row: ...


class JsonLines:
    """A file with a JSON object on every line; empty lines are none."""

    unit = "line"

    def __init__(self, path: Path):
        self.name = str(path)
        self.path = path

    def scan(self) -> Iterator[Found]:
        start = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip(b" \t\r\n\xef\xbb\xbf"):
                    yield found(number, start, len(line), self.parse, line)
                start += len(line)

    def read(self, start: int, size: int) -> Row:
        return self.parse(read_bytes(self.path, start, size))

    def parse(self, line: bytes) -> Row:
        return checked_object(json.loads(line.decode("utf-8-sig").rstrip()))


class Csv:
    """A file with names of columns on its first line; every value is text."""

    unit = "line"

    def __init__(self, path: Path):
        self.name = str(path)
        self.path = path
        self.delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        csv.field_size_limit(LARGEST_FIELD)
        self.columns: list[str] = []

    def scan(self) -> Iterator[Found]:
        with open(self.path, "rb") as file:
            lines = CountedLines(file)
            reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
            self.columns = self.header(reader)
            while True:
                start, number = lines.bytes, lines.number + 1
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                except (csv.Error, UnicodeDecodeError) as error:
                    yield Found(number, start, lines.bytes - start, None, str(error))
                    continue
                if cells:  # an empty line is none
                    yield found(number, start, lines.bytes - start, self.row, cells)

    def header(self, reader: Any) -> list[str]:
        """The names of the columns."""
        try:
            names = next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{self.name}, line 1: {error}") from None
        if not names or not all(names) or len(set(names)) < len(names):
            wanted = "the names of the columns, each once and none empty"
            raise ValueError(f"{self.name}, line 1 must hold {wanted}, got {names}")
        return names

    def read(self, start: int, size: int) -> Row:
        text = read_bytes(self.path, start, size).decode("utf-8-sig")
        (cells,) = csv.reader([text], delimiter=self.delimiter, strict=True)
        return self.row(cells)

    def row(self, cells: list[str]) -> Row:
        if len(cells) != len(self.columns):
            raise ValueError(f"has {len(cells)} cells, and there are {len(self.columns)} columns")
        return dict(zip(self.columns, cells, strict=True))


class CountedLines:
    """The lines of a file as text, and how many lines and bytes have been read."""

    def __init__(self, file: Any):
        self.file = file
        self.number = 0
        self.bytes = 0

    def __iter__(self) -> "CountedLines":
        return self

    def __next__(self) -> str:
        line = next(self.file)
        self.number += 1
        self.bytes += len(line)
        return line.decode("utf-8-sig" if self.number == 1 else "utf-8")


class JsonList:
    """A file that holds a list of objects, or an object of such lists by split; all in memory."""

    unit = "line"

    def __init__(self, path: Path, split: str | None = None):
        self.name = str(path)
        try:
            self.text = path.read_text("utf-8-sig")
            whole = json.loads(self.text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
        self.begin = 0
        if isinstance(whole, dict):
            lists = [name for name, value in whole.items() if isinstance(value, list)]
            split = chosen_split(self.name, lists, split)
            self.begin = start_of_list(self.text, split)
        elif split is not None:
            raise ValueError(f"{path} has no splits, and the split {split!r} is asked for")
        rows = whole[split] if isinstance(whole, dict) else whole
        if not isinstance(rows, list):
            raise ValueError(f"{path} must hold a list of objects, got {type(rows).__name__}")
        self.rows = rows

    def scan(self) -> Iterator[Found]:
        places = places_in_list(self.text, self.begin)
        line, place = 1, 0
        for index, (start, row) in enumerate(zip(places, self.rows, strict=True)):
            line += self.text.count("\n", place, start)
            place = start
            yield found(line, index, 1, checked_object, row)

    def read(self, start: int, size: int) -> Row:
        return self.rows[start]


def start_of_list(text: str, name: str) -> int:
    """Where the value of a name begins in an object that is written as JSON."""
    decoder = json.JSONDecoder()
    place = skip(text, 0) + 1
    while True:
        key, place = decoder.raw_decode(text, skip(text, place))
        place = skip(text, skip(text, place) + 1)
        if key == name:
            return place
        _, place = decoder.raw_decode(text, place)
        place = skip(text, place) + 1


def places_in_list(text: str, begin: int) -> Iterator[int]:
    """Where each element begins in a list that is written as JSON."""
    decoder = json.JSONDecoder()
    place = skip(text, skip(text, begin) + 1)
    while text[place] != "]":
        yield place
        _, place = decoder.raw_decode(text, place)
        place = skip(text, place)
        place = skip(text, place + 1) if text[place] == "," else place


def skip(text: str, place: int) -> int:
    """The first place that holds no white space."""
    while text[place] in " \t\r\n":
        place += 1
    return place


class Table:
    """Rows of the library `datasets`, which maps them into memory: Parquet, folders, Hub ids."""

    unit = "row"

    def __init__(self, name: str, dataset: Any):
        self.name = name
        self.dataset = dataset

    def scan(self) -> Iterator[Found]:
        for number, row in enumerate(self.dataset):
            yield found(number + 1, number, 1, plain_row, row)

    def read(self, start: int, size: int) -> Row:
        return plain_row(self.dataset[start])


def open_source(path_or_id: str | Path, split: str | None, subset: str | None) -> Source:
    """The source of a file, a folder of `datasets` or a Hub id.

    Raises FileNotFoundError where there is no such file, ValueError for one of another kind, or for
    a split or subset that it does not have.
    """
    name, path = str(path_or_id), Path(path_or_id).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir() or (not path.exists() and suffix not in FILES and name.count("/") <= 1):
        return opened_dataset(name, path, split, subset)
    if not path.exists():
        near = [one.name for one in path.parent.glob("*")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near, 1)
        raise FileNotFoundError(
            f"there is no file {name}"
            + (f"; did you mean {path.parent / close[0]}?" if close else "")
        )
    if suffix not in FILES:
        raise ValueError(f"{name} must end in one of {', '.join(FILES)}, by its kind")
    if subset is not None:
        raise ValueError(f"{name} has no subsets, and {subset!r} is asked for")
    if suffix == ".json":
        return JsonList(path, split)
    if split is not None:
        raise ValueError(f"{name} has no splits, and the split {split!r} is asked for")
    if suffix == ".parquet":
        dataset = datasets_for(name).Dataset.from_parquet(str(path))
        return Table(name, dataset)
    return JsonLines(path) if suffix in (".jsonl", ".ndjson") else Csv(path)


def opened_dataset(name: str, path: Path, split: str | None, subset: str | None) -> Source:
    """A folder that `datasets` saved or that holds files of data, or a dataset of the Hub."""
    datasets = datasets_for(name)
    saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else name, subset)
    except Exception as error:  # of many kinds: no network, no such id, a subset to choose
        kind = "folder of datasets" if path.is_dir() else "file, and cannot be read from the Hub"
        raise ValueError(f"{name} is no {kind}: {type(error).__name__}: {error}") from error
    if isinstance(loaded, Mapping):
        split = chosen_split(name, list(loaded), split)
        return Table(f"{name}, split {split}", loaded[split])
    if split is not None:
        raise ValueError(f"{name} has no splits, and the split {split!r} is asked for")
    return Table(name, loaded)


def datasets_for(name: str) -> Any:
    """The library `datasets`, or a ValueError that tells how to get it."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"{name} is read with the library datasets: pip install 'grpo_jax[data]' "
            f"(files that end in {', '.join(FILES[:-1])} are read without it)"
        )
    import datasets

    return datasets


def chosen_split(name: str, splits: Sequence[str], split: str | None) -> str:
    """The split that is asked for, else "train", else the only one."""
    usual = "train" if "train" in splits else splits[0] if len(splits) == 1 else ""
    chosen = usual if split is None else split
    if chosen not in splits:
        asked = "none is chosen" if split is None else f"{split!r} is asked for"
        raise ValueError(f"{name} has the splits {', '.join(splits) or '(none)'}, and {asked}")
    return chosen


def found(number: int, start: int, size: int, parse: Any, content: Any) -> Found:
    """A row, or what is wrong with it."""
    try:
        return Found(number, start, size, parse(content))
    except json.JSONDecodeError as error:
        return Found(number, start, size, None, f"is no JSON: {error.msg}, column {error.colno}")
    except UnicodeDecodeError as error:
        return Found(number, start, size, None, f"is no UTF-8: {error.reason}")
    except ValueError as error:
        return Found(number, start, size, None, str(error))


def checked_object(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with named values, got {json.dumps(value)[:60]}")
    return value


def read_bytes(path: Path, start: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(size)


def plain_row(row: Mapping[str, Any]) -> Row:
    """A row of values that JSON has; others (dates, decimals) as their text."""
    return {name: plain(value) for name, value in row.items()}


def plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(own) for name, own in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set):
        return [plain(own) for own in value]
    return str(value)
