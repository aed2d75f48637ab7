"""Kernels in files of some length: a C compiler takes as long to start as to compile a small kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def files(kernels: Iterable[tuple[str, str]], least: int) -> Iterator[tuple[str, str]]:
    """Names and texts of files, each of the next kernels until it is so long; as soon as a file is whole. It has the
    name of its first kernel."""
    names: list[str] = []
    texts: list[str] = []
    for name, text in kernels:
        names.append(name)
        texts.append(text)
        if sum(map(len, texts)) >= least:
            yield names[0], "".join(texts)
            names, texts = [], []
    if names:
        yield names[0], "".join(texts)
