"""miniImageNet: 100 classes of 600 pictures, 84 x 84, decoded once into a file that is mapped into memory.

Read from a folder `miniimagenet` of either layout:
 - folders: class/*.jpg, or the same below train/, val/ and test/, where a class is in one of them (600 pictures)
   or in train/ and test/ (500 and 100);
 - Ravi and Larochelle's train.csv, val.csv and test.csv (filename,label) beside a folder images/.

Classes are numbered by name. The first 500 pictures of a class are for training and the last 100 for testing, by
file name, or in the order of the CSV file.
"""

import csv
import hashlib
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rgo.data.files import Bar, DataError, Folder, roots
from rgo.data.images import pictures, read_image, subfolders

CLASSES, TRAIN, TEST, SIDE = 100, 500, 100, 84

_NAMES = ("miniimagenet", "mini-imagenet", "mini_imagenet", "miniImageNet")
_PARTS = ("train", "val", "test")
_GET = (
    "ask for access to ImageNet at https://image-net.org, take the pictures listed in "
    "https://github.com/twitter-research/meta-learning-lstm/tree/master/data/miniImagenet, resize them to 84 x 84 "
    "and put them, one folder per class, into "
)


class MiniImageNet(NamedTuple):
    """60,000 pictures of 100 classes: images uint8 (N, 3, 84, 84) in RGB, labels int64 (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def miniimagenet(folder: Folder | None = None) -> MiniImageNet:
    """miniImageNet as tensors, from `folder` or wherever `rgo.data.roots()` has it.

    The first time, the pictures are decoded into a file of 1.3 GB beside their folder (`miniimagenet.npy`; in the
    user's cache if nothing can be written there), which is all that is read from then on: remove it when pictures
    change. Tensors are shared by every caller: copy before writing to them.

    >>> pictures = miniimagenet()                           # doctest: +SKIP
    >>> pictures.test_images.shape                          # doctest: +SKIP
    torch.Size([10000, 3, 84, 84])
    """
    return _miniimagenet(locate(folder))


def locate(folder: Folder | None = None) -> Path:
    """The folder of the pictures; it need not exist any more if the decoded file does."""
    searched = roots(folder)
    for root in searched:
        for place in [root / name for name in _NAMES] + ([root] if folder is not None else []):
            if place.is_dir() or any(decoded.is_file() for decoded in decoded_files(place)):
                return place
    found = f"no folder {_NAMES[0]} in {' or '.join(map(str, searched))}"
    raise DataError(_NAMES[0], "pictures of miniImageNet", found, f"{_GET}{searched[0] / _NAMES[0]}")


def decoded_files(place: Path) -> tuple[Path, Path]:
    """Where the decoded pictures of a folder are kept: beside it or, where that cannot be written, in the cache."""
    digest = hashlib.sha256(str(place.absolute()).encode()).hexdigest()[:12]
    return place.with_name(place.name + ".npy"), roots()[-1] / f"miniimagenet-{digest}.npy"


@cache
def _miniimagenet(place: Path) -> MiniImageNet:
    for decoded in decoded_files(place):
        if decoded.is_file():
            break
    else:
        decoded = _build(place)
    # (N, height, width, RGB) in the file; all that train, then all that test, each by class.
    images = torch.from_numpy(open_decoded(decoded)).permute(0, 3, 1, 2)
    labels = [torch.arange(CLASSES).repeat_interleave(count) for count in (TRAIN, TEST)]
    train = CLASSES * TRAIN
    return MiniImageNet(images[:train], labels[0], images[train:], labels[1])


def open_decoded(path: Path) -> npt.NDArray[np.uint8]:
    """The decoded pictures, mapped; what is written to them stays in this process."""
    shape = CLASSES * (TRAIN + TEST), SIDE, SIDE, 3
    try:
        images: npt.NDArray[np.uint8] = np.load(path, mmap_mode="c", allow_pickle=False)
        found = f"{images.dtype} of shape {images.shape}"
    except (ValueError, EOFError) as error:
        images, found = np.empty(0, np.uint8), f"another file ({error})"
    if images.shape != shape or images.dtype != np.uint8:
        raise DataError(path, f"uint8 of shape {shape}", found, "remove the file: it is made again from the pictures")
    return images


def _build(place: Path) -> Path:
    """Decode under a temporary name, then rename: of two processes that do it at once, both leave a whole file."""
    files = list(listing(place))
    first, second = decoded_files(place)
    decoded = first if os.access(first.parent, os.W_OK) else second
    decoded.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{decoded.name}-", dir=decoded.parent)
    try:
        damaged = []
        with os.fdopen(descriptor, "wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), SIDE, SIDE, 3)}
            np.lib.format.write_array_header_1_0(file, header)
            for pixels in decode(files):
                if isinstance(pixels, DataError):
                    damaged.append(pixels)
                else:
                    file.write(pixels.data)
            file.flush()
            os.fsync(file.fileno())
        if damaged:
            raise damaged[0] if len(damaged) == 1 else _several(place, damaged)
        os.chmod(temporary, 0o644)
        os.replace(temporary, decoded)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    return decoded


def decode(files: list[Path]) -> Iterator[npt.NDArray[np.uint8] | DataError]:
    """The pixels of each file in turn, or what is wrong with it."""

    def one(file: Path) -> npt.NDArray[np.uint8] | DataError:
        try:
            return read_image(file, (SIDE, SIDE))
        except DataError as error:
            return error

    with ThreadPoolExecutor() as threads, Bar("decoding miniImageNet", len(files)) as progress:
        for start in range(0, len(files), 1000):  # so that no more than a thousand wait to be written
            for pixels in threads.map(one, files[start : start + 1000]):
                progress.advance()
                yield pixels


def listing(place: Path) -> Iterator[Path]:
    """All pictures: those that train, then those that test, each by class."""
    remedy = f"{_GET}{place}"
    if not place.is_dir():
        raise DataError(place, "pictures of miniImageNet", "no such folder", remedy)
    classes = _from_csv(place) if any((place / f"{part}.csv").is_file() for part in _PARTS) else _from_folders(place)
    if len(classes) != CLASSES:
        raise DataError(place, f"{CLASSES} classes", f"{len(classes)}", remedy)
    for name, parts in classes.items():
        counts = [len(part) for part in parts]
        if counts not in ([TRAIN + TEST], [TRAIN, TEST]):
            expected = f"{TRAIN + TEST} pictures of class {name}, or {TRAIN} in train and {TEST} in test"
            raise DataError(place, expected, " + ".join(map(str, counts)), remedy)
    ordered = [[file for part in classes[name] for file in part] for name in sorted(classes)]
    yield from (file for files in ordered for file in files[:TRAIN])
    yield from (file for files in ordered for file in files[TRAIN:])


def _from_folders(place: Path) -> dict[str, list[list[Path]]]:
    parts = [place / part for part in _PARTS if (place / part).is_dir()] or [place]
    classes: dict[str, list[list[Path]]] = {}
    for part in parts:
        for folder in subfolders(part):
            classes.setdefault(folder.name, []).append(pictures(folder))
    return classes


def _from_csv(place: Path) -> dict[str, list[list[Path]]]:
    classes: dict[str, list[list[Path]]] = {}
    for table in (place / f"{part}.csv" for part in _PARTS):
        if not table.is_file():
            continue
        with table.open(newline="") as file:
            rows = list(csv.reader(file))
        if not rows or rows[0] != ["filename", "label"] or any(len(row) != 2 for row in rows):
            found = "another table" if rows else "an empty file"
            raise DataError(table, "a table with columns filename,label", found, "get the file again")
        for filename, label in rows[1:]:
            classes.setdefault(label, [[]])[0].append(place / "images" / filename)
    return classes


def _several(place: Path, damaged: list[DataError]) -> DataError:
    names = ", ".join(str(error.args[0]) for error in damaged[:10])
    more = f" and {len(damaged) - 10} more" if len(damaged) > 10 else ""
    remedy = f"get them again (the first: {damaged[0].args[2]})"
    return DataError(place, "whole pictures", f"{len(damaged)} that are not: {names}{more}", remedy)
