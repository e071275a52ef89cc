"""Arrow files of every type that ft reads, and datasets as Hugging Face `datasets` writes them.

    python make_arrow.py

Writes goldens/arrow/: types*.arrow and types.feather with the same rows (file and stream format, lz4 and zstd, changed
dictionaries), rows.json with the rows that pyarrow reads, saved/ (`DatasetDict.save_to_disk`), and
cached/ (files of the cache of `datasets`).
"""

import decimal
import json
import math
import shutil
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.feather

OUT = Path(__file__).parent / "goldens" / "arrow"
ROWS = 7


def column(kind, values):
    return pa.array(values, kind)


def table(first):
    """Rows `first` to `first + ROWS`, with nulls, empty values and values that differ."""
    at = range(first, first + ROWS)
    words = ["red", "green", None, "blue", "", "green", "a text of more than twelve bytes: ä"]
    texts = [words[i % 7] for i in at]
    lists = [None if i % 5 == 4 else [words[(i + k) % 7] for k in range(i % 3)] for i in at]
    turns = [[{"role": r, "content": f"{r} {i}"} for r in ("user", "assistant")] for i in at]
    view_lists = column(pa.list_view(pa.int32()), [[i] * (i % 3) for i in at])
    arrays = {
        "text": column(pa.string(), texts),
        "large": column(pa.large_string(), texts),
        "view": column(pa.string_view(), texts),
        "bytes": column(pa.binary(), [None if t is None else t.encode() for t in texts]),
        "fixed": column(pa.binary(3), [f"{i:03}".encode() for i in at]),
        "word": column(pa.string(), texts).dictionary_encode(),
        "words": pa.ListArray.from_arrays([0, 2, 2, 3, 5, 5, 6, 7], column(pa.string(), texts).dictionary_encode()),
        "list": column(pa.list_(pa.string()), lists),
        "large_list": column(pa.large_list(pa.string()), lists),
        "view_list": view_lists,
        "pair": column(pa.list_(pa.int16(), 2), [[i, -i] for i in at]),
        "messages": column(pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})), turns),
        "struct": column(pa.struct({"a": pa.int64(), "b": pa.bool_()}),
                         [None if i % 4 == 3 else {"a": i, "b": i % 2 == 0} for i in at]),
        "bool": column(pa.bool_(), [None if i % 3 == 2 else i % 2 == 0 for i in at]),
        "int8": column(pa.int8(), [-i for i in at]),
        "uint8": column(pa.uint8(), [200 + i for i in at]),
        "int16": column(pa.int16(), [-300 * i for i in at]),
        "uint16": column(pa.uint16(), [3000 * i for i in at]),
        "int32": column(pa.int32(), [None if i == 1 else -100000 * i for i in at]),
        "uint32": column(pa.uint32(), [2**31 + i for i in at]),
        "int64": column(pa.int64(), [-(2**40) * i for i in at]),
        "uint64": column(pa.uint64(), [2**63 + i for i in at]),
        "half": column(pa.float16(), [i / 4 for i in at]),
        "float": column(pa.float32(), [i / 8 for i in at]),
        "double": column(pa.float64(), [None if i == 2 else i / 3 for i in at]),
        "decimal": column(pa.decimal128(9, 2), [decimal.Decimal(-i) / 8 * 2 for i in at]),
        "date": column(pa.date32(), list(at)),
        "time": column(pa.timestamp("ms"), [1000 * i for i in at]),
        "null": column(pa.null(), [None] * ROWS),
        "map": column(pa.map_(pa.string(), pa.int32()), [[(f"k{i}", i)] if i % 2 else None for i in at]),
    }
    return pa.table(arrays)


def plain(value, kind):
    """A value as ft reads it."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return dict(value)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, decimal.Decimal):
        return str(value)
    assert not (isinstance(value, float) and math.isnan(value))
    return value


def rows(tables):
    out = []
    for t in tables:
        numbers = {"date": t["date"].cast(pa.int32()), "time": t["time"].cast(pa.int64())}
        columns = {n: numbers.get(n, t[n]).to_pylist() for n in t.column_names}
        for i in range(t.num_rows):
            out.append({n: plain(columns[n][i], t.schema.field(n).type) for n in t.column_names})
    return out


def write(path, tables, new, **options):
    with new(str(path), tables[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for t in tables:
            writer.write_table(t)


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    tables = [table(0), table(ROWS)]
    (OUT / "rows.json").write_text(json.dumps(rows(tables), ensure_ascii=False) + "\n")
    # In a file a dictionary is the same for all batches, or grows.
    one = [t.unify_dictionaries() for t in pa.concat_tables(tables).unify_dictionaries().to_batches()
           for t in [pa.Table.from_batches([t])]]
    write(OUT / "types.arrow", one, pa.ipc.new_file)
    write(OUT / "types-zstd.arrow", one, pa.ipc.new_file, compression="zstd")
    write(OUT / "types-stream.arrow", tables, pa.ipc.new_stream)
    write(OUT / "types-lz4.arrow", tables, pa.ipc.new_stream, compression="lz4")
    write(OUT / "types-deltas.arrow", one, pa.ipc.new_stream, emit_dictionary_deltas=True)
    feather = pa.concat_tables(tables).unify_dictionaries()
    pa.feather.write_feather(feather, str(OUT / "types.feather"), compression="lz4", chunksize=5)

    def made(first, n):
        turn = lambda i: [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
        return datasets.Dataset.from_dict({"messages": [turn(i) for i in range(first, first + n)]})

    both = datasets.DatasetDict({"train": made(0, 9), "test": made(100, 3)})
    both.save_to_disk(str(OUT / "saved"), num_shards={"train": 2, "test": 1})
    # A shard of an earlier, larger version, which state.json does not name.
    shutil.copy(OUT / "saved/test/data-00000-of-00001.arrow", OUT / "saved/train/data-00002-of-00003.arrow")
    cached = OUT / "cached" / "org___rows" / "default" / "0.0.0" / "0123abcd"
    cached.mkdir(parents=True)
    shutil.copy(OUT / "saved/train/data-00000-of-00002.arrow", cached / "rows-train-00000-of-00002.arrow")
    shutil.copy(OUT / "saved/train/data-00001-of-00002.arrow", cached / "rows-train-00001-of-00002.arrow")
    shutil.copy(OUT / "saved/test/data-00000-of-00001.arrow", cached / "rows-test.arrow")
    # The result of `map`, which is not a part of the data.
    shutil.copy(OUT / "saved/test/data-00000-of-00001.arrow", cached / "cache-0123456789abcdef.arrow")
    (cached / "dataset_info.json").write_text("{}\n")


if __name__ == "__main__":
    main()
