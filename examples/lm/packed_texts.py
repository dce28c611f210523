"""Texts for the language-model example: a folder of text files, or a dataset, as blocks of tokens of one length."""

from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset

IGNORED = -100  # the label of a token that does not count
HELD_OUT_FRACTION = 0.1
SPLIT_SEED = 0  # not --seed: runs that differ in their seed stay comparable


def load_texts(name: str) -> DatasetDict:
    """The splits ``train`` and ``test`` of a folder of ``.txt`` files, or of a dataset; each ``text`` is a document."""
    if Path(name).is_dir():
        files = sorted(str(path) for path in Path(name).glob("*.txt"))
        if not files:
            raise ValueError(f"{name} has no .txt files.")
        splits = load_dataset("text", data_files={"train": files}, sample_by="paragraph")
    else:
        splits = load_dataset(name)
    if "test" not in splits:
        splits = splits["train"].train_test_split(HELD_OUT_FRACTION, seed=SPLIT_SEED)
    return splits


def pack(texts: Dataset, tokenizer: Any, length: int) -> Dataset:
    """All texts, one after the other, in blocks of ``length`` tokens: no block has padding but the last.

    Each row has ``input_ids``, ``attention_mask`` and ``labels``, which are the tokens, and ``IGNORED`` for padding.
    """
    end = tokenizer.eos_token_id

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        tokens = list(chain.from_iterable([*ids, end] for ids in encoded))
        packed: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for start in range(0, len(tokens), length):
            part = tokens[start : start + length]
            filler = length - len(part)
            packed["input_ids"].append(part + [end] * filler)
            packed["attention_mask"].append([1] * len(part) + [0] * filler)
            packed["labels"].append(part + [IGNORED] * filler)
        return packed

    # All rows at once, so that only the last block is not full.
    packed = texts.map(blocks, batched=True, batch_size=None, remove_columns=texts.column_names, desc="packing")
    return packed.with_format("torch")
