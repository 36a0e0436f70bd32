"""CIFAR-100 in its official binary layout, packed or unpacked.

A record is one byte of coarse label, one of fine label and 3 x 32 x 32 bytes of pixels (the planes R, G, B).
"""

import gzip
import io
import tarfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rgo.data.files import DataError, Folder, roots

URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-100-binary.tar.gz"
PER_CLASS = {"train": 500, "test": 100}

_FOLDER = "cifar-100-binary"
_RECORD = 2 + 3 * 32 * 32
_GET = f"rgo.data.fetch('cifar100') downloads it; or get {URL}{ARCHIVE} (169 MB) and put it, packed or unpacked, into "


class CIFAR100(NamedTuple):
    """60,000 pictures of 100 classes: images uint8 (N, 3, 32, 32), fine labels int64 (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def cifar100(folder: Folder | None = None) -> CIFAR100:
    """CIFAR-100 as tensors, from `folder` or wherever `rgo.data.roots()` has it.

    Reads `cifar-100-binary/train.bin` and `test.bin`, mapped into memory, or `cifar-100-binary.tar.gz`. Tensors
    are shared by every caller: copy before writing to them. The pickled version is never read.

    >>> pictures = cifar100()                               # doctest: +SKIP
    >>> pictures.train_images.shape                         # doctest: +SKIP
    torch.Size([50000, 3, 32, 32])
    """
    return _cifar100(locate(folder))


def locate(folder: Folder | None = None) -> Path:
    """The folder that holds train.bin and test.bin, or the archive."""
    searched = roots(folder)
    for root in searched:
        for place in (root / _FOLDER, root):
            if any((place / f"{split}.bin").is_file() for split in PER_CLASS):
                return place
        if (root / ARCHIVE).is_file():
            return root / ARCHIVE
        if root.name == ARCHIVE and root.is_file():
            return root
    remedy = _GET + str(searched[0])
    for root in searched:
        for name in ("cifar-100-python", "cifar-100-python.tar.gz"):
            if root.name == name or (root / name).exists():
                found = f"the pickled version ({name}), which is never read: a pickle can run any code"
                raise DataError(root, "the binary version of CIFAR-100", found, remedy)
    found = f"none in {' or '.join(map(str, searched))}"
    raise DataError(_FOLDER, "train.bin and test.bin, or " + ARCHIVE, found, remedy)


@cache
def _cifar100(place: Path) -> CIFAR100:
    if place.name == ARCHIVE:
        contents = _unpack(place)
        train, test = (read_records(place / split, PER_CLASS[split], contents[split]) for split in PER_CLASS)
    else:
        train, test = (read_records(place / f"{split}.bin", PER_CLASS[split]) for split in PER_CLASS)
    return CIFAR100(*train, *test)


def _unpack(archive: Path) -> dict[str, bytearray]:
    try:
        # Decompressed to its end, because gzip's own check sum comes last.
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(archive.read_bytes()))) as tar:
            members = {split: tar.extractfile(f"{_FOLDER}/{split}.bin") for split in PER_CLASS}
            return {split: bytearray(member.read()) for split, member in members.items() if member is not None}
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError) as error:
        expected = f"a whole archive with {_FOLDER}/train.bin and test.bin"
        raise DataError(archive, expected, f"another one ({error})", _GET + str(archive.parent)) from error


def read_records(path: Path, per_class: int, content: bytearray | None = None) -> tuple[Tensor, Tensor]:
    """Images and fine labels of one file (or of its `content`), of which each class must have `per_class`."""
    remedy = _GET + str(path.parents[1])
    try:
        # Mode "c": mapped, and what is written to the tensor stays in this process.
        data: npt.NDArray[Any] = np.memmap(path, np.uint8, "c") if content is None else np.frombuffer(content, np.uint8)
    except FileNotFoundError:
        raise DataError(path, f"{100 * per_class} records of CIFAR-100", "no such file", remedy) from None
    except ValueError:  # an empty file cannot be mapped
        data = np.empty(0, np.uint8)
    if len(data) != 100 * per_class * _RECORD:
        expected = f"{100 * per_class} records of {_RECORD} bytes, {100 * per_class * _RECORD} in all"
        raise DataError(path, expected, f"{len(data)} bytes", remedy)
    records = data.reshape(-1, _RECORD)
    for column, kind, classes in ((0, "coarse", 20), (1, "fine", 100)):
        labels = records[:, column]
        if labels.max() >= classes:
            first = int((labels >= classes).argmax())
            expected = f"{kind} labels from 0 to {classes - 1}"
            raise DataError(path, expected, f"label {labels[first]} in record {first}", remedy)
        counts = np.bincount(labels, minlength=classes)
        if (counts != 100 * per_class // classes).any():
            odd = int((counts != 100 * per_class // classes).argmax())
            expected = f"{100 * per_class // classes} records of every {kind} label"
            raise DataError(path, expected, f"{counts[odd]} of label {odd}", remedy)
    # One array from the whole file: 50,000 x 2 strided bytes are read, the pixels only when somebody wants them.
    images = torch.from_numpy(records[:, 2:].reshape(-1, 3, 32, 32))
    return images, torch.from_numpy(records[:, 1].astype(np.int64))
