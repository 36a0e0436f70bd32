"""What there is to download, from where, and whether what is here is whole."""

import difflib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rgo.data import cifar, idx, mini
from rgo.data.files import Bar, DataError, Folder, lab, roots

Condition = Literal["ok", "missing", "damaged"]


@dataclass(frozen=True)
class File:
    """One file to download; `name` is its place under the data folder."""

    name: str
    bytes: int
    md5: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """A data set: where its files come from and under which terms."""

    name: str
    title: str
    url: str
    files: tuple[File, ...]  # none: nothing that may be downloaded automatically
    bytes: int
    licence: str


_MNIST = (
    (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)

_SOURCES = (
    Source(
        "mnist",
        "MNIST: 70,000 handwritten digits (inside the package)",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        tuple(File(f"mnist/{name}", size, md5, sha) for (name, md5), (size, sha) in zip(idx.FILES, _MNIST)),
        sum(size for size, _ in _MNIST),
        "CC BY-SA 3.0, as usually given; cite LeCun, Cortes and Burges",
    ),
    Source(
        "cifar100",
        "CIFAR-100, binary version: 60,000 pictures of 100 classes",
        cifar.URL,
        (
            File(
                cifar.ARCHIVE,
                168513733,
                "03b5dce01913d631647c71ecec9e9cb8",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        168513733,
        "none stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    ),
    Source(
        "miniimagenet",
        "miniImageNet: 60,000 pictures of 100 classes of ImageNet, 84 x 84",
        "https://github.com/twitter-research/meta-learning-lstm/tree/master/data/miniImagenet",
        (),
        1_300_000_000,
        "ImageNet's terms: non-commercial research and education; ask at https://image-net.org",
    ),
)


def sources() -> dict[str, Source]:
    """The data sets by name.

    >>> [(source.name, len(source.files)) for source in sources().values()]
    [('mnist', 4), ('cifar100', 1), ('miniimagenet', 0)]
    """
    return {source.name: source for source in _SOURCES}


def fetch(name: str, folder: Folder | None = None, *, mirror: str | None = None, retries: int = 3) -> list[Path]:
    """Download a data set into `folder` (by default the first of `rgo.data.roots()`); what is there and whole stays.

    A dropped connection is taken up where it broke, now or by the next call. `mirror` is the URL of another place
    that has the same files; whatever comes must have the published checksum.

    >>> fetch("cifar100")                                   # doctest: +SKIP
    [PosixPath('/home/me/.cache/rgo/cifar-100-binary.tar.gz')]
    """
    source = _source(name)
    if not source.files:
        mini.locate(folder)  # says where to get it by hand
        return []
    pooch = lab("pooch")
    errors: Any = lab("requests").exceptions
    root = roots(folder)[0]
    base = (mirror or source.url).rstrip("/") + "/"
    store = pooch.create(
        path=root,
        base_url=base,
        registry={file.name: f"sha256:{file.sha256}" for file in source.files},
        urls={file.name: base + file.name.rpartition("/")[2] for file in source.files},
        retry_if_failed=retries,
    )
    paths = []
    for file in source.files:
        target, url = root / file.name, store.get_url(file.name)
        remedy = f"try again later, or get {url} by hand and put it there"
        try:
            paths.append(Path(store.fetch(file.name, downloader=_Resuming(target, file.bytes))))
        except errors.RequestException as error:  # some of which are ValueErrors, and all OSErrors
            raise DataError(target, f"a download of {file.bytes} bytes", f"{error}", remedy) from error
        except ValueError as error:  # pooch's word for a wrong checksum; it has removed the download
            raise DataError(target, f"SHA-256 {file.sha256}", f"another file at {url}", remedy) from error
        except OSError as error:
            raise DataError(target, "a place that can be written", f"{error}", "name another folder") from error
    return paths


class _Resuming:
    """A downloader for pooch that keeps what arrived of `target` beside it, and asks for the rest only."""

    def __init__(self, target: Path, size: int) -> None:
        self._part, self._size = target.with_name(target.name + ".part"), size

    def __call__(self, url: str, output: str, pooch: object) -> None:
        have = self._part.stat().st_size if self._part.exists() else 0
        if have > self._size:
            have = 0
        if have < self._size:
            # Uncompressed in transit: a range counts the bytes that travel.
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            with lab("requests").get(url, headers=headers, stream=True, timeout=30) as response:
                response.raise_for_status()
                have = have if response.status_code == 206 else 0  # 200: from the beginning after all
                with (
                    open(self._part, "ab" if have else "wb") as file,
                    Bar(self._part.stem, self._size, in_bytes=True) as progress,
                ):
                    progress.advance(have)
                    for chunk in response.iter_content(1 << 16):
                        file.write(chunk)
                        progress.advance(len(chunk))
        os.replace(self._part, output)


def verify(name: str, folder: Folder | None = None) -> dict[str, Condition]:
    """For each file of a data set that the readers would use, whether it is whole.

    Checksums where they are published, content otherwise: CIFAR-100 unpacked by sizes and labels, miniImageNet by
    decoding every picture.

    >>> set(verify("mnist").values())
    {'ok'}
    """
    return {
        "mnist": _verify_mnist,
        "cifar100": _verify_cifar100,
        "miniimagenet": _verify_miniimagenet,
    }[_source(name).name](folder)


def _verify_mnist(folder: Folder | None) -> dict[str, Condition]:
    place = idx.PACKAGED if folder is None else roots(folder)[0]
    place = place / "mnist" if (place / "mnist").is_dir() else place
    return {str(place / name): _checksum(place / name, md5) for name, md5 in idx.FILES}


def _verify_cifar100(folder: Folder | None) -> dict[str, Condition]:
    try:
        place = cifar.locate(folder)
    except DataError:
        return {str(roots(folder)[0] / cifar.ARCHIVE): "missing"}
    if place.name == cifar.ARCHIVE:
        return {str(place): _checksum(place, sources()["cifar100"].files[0].md5)}
    found: dict[str, Condition] = {}
    for split, per_class in cifar.PER_CLASS.items():
        file = place / f"{split}.bin"
        try:
            cifar.read_records(file, per_class)
            found[str(file)] = "ok"
        except DataError:
            found[str(file)] = "damaged" if file.exists() else "missing"
    return found


def _verify_miniimagenet(folder: Folder | None) -> dict[str, Condition]:
    try:
        place = mini.locate(folder)
    except DataError as error:
        return {str(roots(folder)[0] / error.args[0]): "missing"}
    found: dict[str, Condition] = {}
    for decoded in filter(Path.is_file, mini.decoded_files(place)):
        try:
            mini.open_decoded(decoded)
            found[str(decoded)] = "ok"
        except DataError:
            found[str(decoded)] = "damaged"
    if place.is_dir():
        try:
            files = list(mini.listing(place))
        except DataError:
            return found | {str(place): "damaged"}
        for file, pixels in zip(files, mini.decode(files)):
            whole = not isinstance(pixels, DataError)
            found[str(file)] = "ok" if whole else "damaged" if file.exists() else "missing"
    return found


def _checksum(path: Path, md5: str) -> Condition:
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return "ok" if found == md5 else "damaged"


def _source(name: str) -> Source:
    if name not in sources():
        near = difflib.get_close_matches(name, sources(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name!r} is not a data set: give one of {', '.join(map(repr, sources()))}{hint}")
    return sources()[name]
