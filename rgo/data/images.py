"""Pictures, decoded with Pillow."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from rgo.data.files import DataError, Folder, lab

SUFFIXES = (".jpg", ".jpeg", ".png")


def read_image(path: Folder, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
    """A picture as uint8 (height, width, 3), in RGB; with `size` = (height, width), it must have this size.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (6, 4), "red").save(f"{folder}/red.png")
    ...     read_image(f"{folder}/red.png").shape
    (4, 6, 3)
    """
    pillow = lab("PIL.Image")
    try:
        with pillow.open(path) as image:
            image.verify()  # a PNG to its end, which decoding does not reach
        with pillow.open(path) as image:
            pixels: npt.NDArray[np.uint8] = np.array(image.convert("RGB"))
    # Pillow reports a damaged PNG chunk as a SyntaxError.
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        found = "no such file" if isinstance(error, FileNotFoundError) else f"a damaged one ({error})"
        raise DataError(path, "a picture", found, "get the file again") from error
    if size is not None and pixels.shape[:2] != size:
        expected, found = (f"{height} x {width} pixels" for height, width in (size, pixels.shape[:2]))
        raise DataError(path, expected, found, "resize the pictures beforehand")
    return pixels


def pictures(folder: Path) -> list[Path]:
    """The pictures in a folder, by name."""
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.name[0] != ".")


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
