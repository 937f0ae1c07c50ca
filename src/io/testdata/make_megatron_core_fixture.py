#!/usr/bin/env python3
"""Writes .bin/.idx fixtures with Megatron's own IndexedDatasetBuilder.

Needs the wheels megatron-core (0.16.1 was used; --no-deps), packaging, numpy and torch in an environment of their own.
With --check PREFIX it reads a pair of ours back instead, with Megatron's own IndexedDataset, and prints it as JSON: the
sequences, and the document entries.

mcore_u16, mcore_i32: four documents with 2, 1, 3 and 1 sequences, as preprocess_data.py --split-sentences makes them.
mcore_flat: three documents of one sequence, as it makes them without.
"""
import json
import pathlib
import sys

import numpy
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path

FOLDER = pathlib.Path(__file__).resolve().parent
DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10]], [[11], [12, 13, 14, 15], [16, 17]], [[18, 19]]]


def write(name, vocabulary, first, documents=DOCUMENTS):
    prefix = str(FOLDER / name)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=DType.optimal_dtype(vocabulary))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor([first + t for t in sequence]))
        builder.end_document()
    builder.finalize(get_idx_path(prefix))


if sys.argv[1:2] == ["--check"]:
    data = IndexedDataset(sys.argv[2])
    print(json.dumps({"dtype": numpy.dtype(data.index.dtype).name, "sequences": [data[i].tolist() for i in range(len(data))],
                      "documents": data.document_indices.tolist()}))
else:
    write("mcore_u16", 50257, 0)
    write("mcore_i32", 151936, 100000)
    write("mcore_flat", 50257, 0, [[[5, 6, 7]], [[50256]], [[8, 9]]])
