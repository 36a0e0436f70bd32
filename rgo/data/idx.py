"""MNIST: the four official files, which ship inside the package, checked whenever they are read."""

import gzip
import hashlib
import zlib
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rgo.data.files import DataError, Folder

PACKAGED = Path(__file__).parents[1] / "datasets" / "mnist"

# In the order of MNIST's fields; the MD5 sums are those published with the files.
FILES = (
    ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_GET_AGAIN = "get the file again (https://ossci-datasets.s3.amazonaws.com/mnist/) or reinstall rgo, which ships it"


class MNIST(NamedTuple):
    """70,000 handwritten digits: images uint8 (N, 28, 28), labels int64 (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def mnist(folder: Folder | None = None) -> MNIST:
    """MNIST as tensors; `folder` reads the four official .gz files from elsewhere, with the same checks.

    The tensors are read once and shared by every caller: copy before writing to them.

    >>> digits = mnist()
    >>> digits.train_images.shape, digits.test_labels[:5].tolist()
    (torch.Size([60000, 28, 28]), [7, 2, 1, 0, 4])
    """
    return _mnist(PACKAGED if folder is None else Path(folder))


@cache
def _mnist(folder: Path) -> MNIST:
    train_images, train_labels, test_images, test_labels = (read_idx(folder / name, md5=md5) for name, md5 in FILES)
    return MNIST(train_images, train_labels.long(), test_images, test_labels.long())


def read_idx(path: Folder, *, md5: str | None = None) -> Tensor:
    """The array in an IDX file, gzipped or not; with `md5`, the file itself must have this MD5 sum.

    IDX is two zero bytes, a type code, the number of dimensions, each size as a big-endian uint32, then the
    array in big-endian C order and nothing after it.

    >>> read_idx(PACKAGED / "t10k-labels-idx1-ubyte.gz")[:5]
    tensor([7, 2, 1, 0, 4], dtype=torch.uint8)
    """
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(path, "an IDX file", "no such file", _GET_AGAIN) from None
    if md5 is not None:
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != md5:
            raise DataError(path, f"MD5 {md5}", f"MD5 {found} ({len(content)} bytes)", _GET_AGAIN)
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(path, "a whole gzip file", f"a damaged one ({error})", _GET_AGAIN) from error

    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _IDX_TYPES or magic[3] == 0:
        expected = "an IDX header (00 00, a type code in 08 09 0b 0c 0d 0e, a number of dimensions)"
        raise DataError(path, expected, f"bytes {magic.hex(' ')!r}", _GET_AGAIN)
    header = 4 + 4 * magic[3]
    if len(content) < header:
        expected = f"a header of {header} bytes for {magic[3]} dimensions"
        raise DataError(path, expected, f"a file truncated after {len(content)} bytes", _GET_AGAIN)
    sizes = tuple(int(size) for size in np.frombuffer(content[4:header], ">u4"))
    dtype = np.dtype(_IDX_TYPES[magic[2]])
    difference = len(content) - header - prod(sizes) * dtype.itemsize
    if difference:
        expected = f"{prod(sizes) * dtype.itemsize} bytes of data for an array of {' x '.join(map(str, sizes))}"
        found = f"{abs(difference)} {'trailing' if difference > 0 else 'missing'} bytes"
        raise DataError(path, expected, found, _GET_AGAIN)
    array = np.frombuffer(content, dtype, offset=header).reshape(sizes)
    return torch.from_numpy(array.astype(dtype.newbyteorder("=")))
