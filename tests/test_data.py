import doctest
import gzip
import hashlib
import importlib
import os
import pickle
import pkgutil
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import rgo.data
from rgo.data import (
    DataError,
    cifar,
    cifar100,
    fetch,
    mini,
    miniimagenet,
    mnist,
    read_idx,
    read_image,
    roots,
    sources,
    verify,
)
from rgo.data import idx as idx_files
from rgo.data.files import Bar

PACKAGED = Path(rgo.__file__).parent / "datasets" / "mnist"


def idx(code=0x08, sizes=(2, 3), data=bytes(6)):
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, code, len(sizes), *sizes) + data


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "some.idx"
        path.write_bytes(content)
        return path

    return write


def test_mnist_is_the_seventy_thousand_digits():
    train_images, train_labels, test_images, test_labels = mnist()
    assert train_images.shape == (60_000, 28, 28)
    assert test_images.shape == (10_000, 28, 28)
    assert train_images.dtype == test_images.dtype == torch.uint8
    assert train_labels.dtype == test_labels.dtype == torch.int64
    assert train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # The mean and standard deviation everybody normalises MNIST with.
    pixels = train_images.double() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert pixels.std().item() == pytest.approx(0.3081, abs=5e-5)


def test_mnist_is_read_once():
    assert mnist().train_images is mnist().train_images


def test_mnist_can_be_read_from_another_folder(tmp_path):
    shutil.copytree(PACKAGED, tmp_path, dirs_exist_ok=True)
    for here, there in zip(mnist(), mnist(str(tmp_path))):
        assert here is not there
        assert torch.equal(here, there)


def test_a_missing_file_is_named_with_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: .*no such file; get the file again"):
        mnist(tmp_path)


def test_a_well_formed_file_with_other_content_is_refused_by_its_checksum(tmp_path):
    shutil.copytree(PACKAGED, tmp_path, dirs_exist_ok=True)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(gzip.decompress(labels.read_bytes()))
    content[-1] ^= 1
    labels.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"t10k-labels.*expected MD5 ec29112dd5afa0611ce80d1b7f02629c, found MD5"):
        mnist(tmp_path)


def test_a_download_that_stopped_early_is_refused(file):
    whole = (PACKAGED / "t10k-labels-idx1-ubyte.gz").read_bytes()
    with pytest.raises(DataError, match="expected a whole gzip file, found a damaged one"):
        read_idx(file(whole[:-100]))


def test_a_flipped_byte_inside_a_gzip_file_is_refused(file):
    content = bytearray((PACKAGED / "t10k-labels-idx1-ubyte.gz").read_bytes())
    content[2000] ^= 0xFF
    with pytest.raises(DataError, match="damaged"):
        read_idx(file(content))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.float32, np.float64])
def test_every_idx_type_is_read_back(file, dtype):
    array = np.arange(-3, 21).astype(dtype).reshape(2, 3, 4)
    code = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}[array.dtype.str[1:]]
    content = idx(code, array.shape, array.astype(array.dtype.newbyteorder(">")).tobytes())
    for path in file(content), file(gzip.compress(content)):
        tensor = read_idx(path)
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.numpy().tolist() == array.tolist()
        tensor.zero_()  # the caller's own: writing to it is nobody else's business


def test_an_empty_array_is_an_array(file):
    assert read_idx(file(idx(sizes=(0, 3), data=b""))).shape == (0, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "expected an IDX header", id="empty file"),
        pytest.param(b"\0\0\x08", "expected an IDX header", id="three bytes"),
        pytest.param(b"\x89PNG" + bytes(20), "found bytes '89 50 4e 47'", id="a picture"),
        pytest.param(idx(code=0x0A), "found bytes '00 00 0a 02'", id="unknown type"),
        pytest.param(idx(sizes=()), "found bytes '00 00 08 00'", id="no dimensions"),
        pytest.param(idx()[:7], "a header of 12 bytes for 2 dimensions, found a file truncated", id="half a header"),
        pytest.param(idx()[:-1], "6 bytes of data for an array of 2 x 3, found 1 missing", id="truncated"),
        pytest.param(idx() + b"\0\0", "2 x 3, found 2 trailing bytes", id="trailing"),
        pytest.param(idx(code=0x0D), "24 bytes .*found 18 missing", id="sizes count elements, not bytes"),
        pytest.param(idx(sizes=(2**32 - 1,) * 3), "missing", id="sizes beyond 64 bits"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(file, content, message):
    with pytest.raises(DataError, match=message) as raised:
        read_idx(file(content))
    assert "some.idx" in str(raised.value)


def test_a_data_error_survives_the_way_back_from_a_worker_process():
    error = DataError("file", "this", "that", "do so")
    assert str(pickle.loads(pickle.dumps(error))) == "file: expected this, found that; do so"


@pytest.mark.parametrize("module", [m.name for m in pkgutil.walk_packages(rgo.data.__path__, "rgo.data.")])
def test_the_examples_of_the_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("module", ["rgo.data", "rgo.benchmarks"])
def test_importing_needs_torch_and_numpy_only(module):
    code = f"import sys, {module}; print({{'PIL', 'pooch', 'requests', 'rich'}} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert printed.stdout == "set()\n"


def test_what_the_extra_brings_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pillow, which is not installed: pip install 'rgo\[lab\]'"):
        read_image(tmp_path / "some.png")


def test_a_terminal_sees_progress(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("decoding", 20) as progress:
        for _ in range(20):
            progress.advance()
    assert "20/20" in capsys.readouterr().err


# --- where files are found


def test_files_are_looked_for_in_the_named_folder_then_in_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("RGO_DATA", "/data")
    assert roots() == (Path("/data"), Path("/caches/rgo"))
    assert roots("/other") == (Path("/other"),)
    monkeypatch.delenv("RGO_DATA")
    assert roots() == (Path("/caches/rgo"),)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert roots() == (Path.home() / ".cache/rgo",)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty $RGO_DATA, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("RGO_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("read", "where"),
    [(cifar100, r"https://\S+/cifar-100-binary\.tar\.gz \(169 MB\)"), (miniimagenet, "https://image")],
)
def test_a_data_set_that_is_nowhere_is_answered_with_where_to_get_it_and_where_to_put_it(data, read, where):
    with pytest.raises(DataError, match=f"in {data} or {data.parent}/caches/rgo; .*{where}.* into {data}"):
        read()


# --- CIFAR-100


def records(per_class, seed=0):
    """A small file in CIFAR-100's binary layout: uint8 (100 * per_class, 3074)."""
    rng = np.random.RandomState(seed)
    fine = rng.permutation(np.repeat(np.arange(100, dtype=np.uint8), per_class))
    pixels = rng.randint(0, 256, (len(fine), 3072), dtype=np.uint8)
    return np.concatenate([fine[:, None] // 5, fine[:, None], pixels], axis=1)


@pytest.fixture
def small_cifar(data, monkeypatch):
    """CIFAR-100 with five pictures per class to train and two to test, unpacked into $RGO_DATA."""
    monkeypatch.setitem(cifar.PER_CLASS, "train", 5)
    monkeypatch.setitem(cifar.PER_CLASS, "test", 2)
    folder = data / "cifar-100-binary"
    folder.mkdir()
    records(5).tofile(folder / "train.bin")
    records(2, seed=1).tofile(folder / "test.bin")
    return folder


def packed(folder):
    """The same as an archive, in place of the folder."""
    archive = folder.with_name("cifar-100-binary.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    shutil.rmtree(folder)
    return archive


@pytest.mark.parametrize("layout", ["unpacked", "packed", "cache"])
def test_cifar100_is_read_packed_and_unpacked(small_cifar, layout, monkeypatch):
    if layout == "packed":
        packed(small_cifar)
    elif layout == "cache":
        cache = roots()[1]
        cache.mkdir(parents=True)
        small_cifar.rename(cache / small_cifar.name)
    pictures = cifar100()
    for images, labels, file in zip(pictures[::2], pictures[1::2], (records(5), records(2, seed=1))):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert np.array_equal(images.numpy(), file[:, 2:].reshape(-1, 3, 32, 32))
        assert labels.tolist() == file[:, 1].tolist()
    assert cifar100().train_images is pictures.train_images


def test_what_is_written_to_a_mapped_picture_does_not_reach_the_file(small_cifar):
    cifar100().train_images.zero_()
    assert np.array_equal(np.fromfile(small_cifar / "train.bin", np.uint8), records(5).ravel())


@pytest.mark.parametrize("below", [".", "cifar-100-binary"])
def test_cifar100_is_read_from_a_folder_of_your_own(small_cifar, below):
    assert cifar100(small_cifar.parent / below).train_images.shape == (500, 3, 32, 32)


@pytest.mark.parametrize("name", ["cifar-100-python/train", "cifar-100-python.tar.gz"])
def test_the_pickled_version_is_not_read(data, name):
    (data / name).parent.mkdir(exist_ok=True)
    (data / name).write_bytes(b"never opened")
    message = r"binary version of CIFAR-100, found the pickled version .* never read.*cifar-100-binary\.tar\.gz"
    with pytest.raises(DataError, match=message):
        cifar100()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda r: r.ravel()[:-1], "expected 500 records .* 1537000 in all, found 1536999", id="truncated"),
        pytest.param(lambda r: np.append(r, np.uint8(0)), "found 1537001 bytes", id="trailing"),
        pytest.param(lambda r: r[:0], "found 0 bytes", id="empty"),
        pytest.param(lambda r: np.where(np.arange(3074) == 1, 100, r), "0 to 99, found label 100", id="fine"),
        pytest.param(lambda r: np.where(np.arange(3074) == 0, 20, r), "0 to 19, found label 20", id="coarse"),
        pytest.param(lambda r: r[np.r_[0:499, 0]], "records of every (coarse|fine) label, found", id="counts"),
    ],
)
def test_a_cifar100_file_that_is_not_what_it_should_be_is_refused(small_cifar, change, message):
    change(records(5)).astype(np.uint8).tofile(small_cifar / "train.bin")
    with pytest.raises(DataError, match=message) as raised:
        cifar100()
    assert "train.bin" in str(raised.value)
    assert verify("cifar100") == {str(small_cifar / "train.bin"): "damaged", str(small_cifar / "test.bin"): "ok"}


def test_half_of_cifar100_is_named(small_cifar):
    (small_cifar / "test.bin").unlink()
    with pytest.raises(DataError, match=r"test\.bin: .*no such file; "):
        cifar100()
    assert verify("cifar100")[str(small_cifar / "test.bin")] == "missing"


def test_a_damaged_archive_is_refused(small_cifar):
    archive = packed(small_cifar)
    whole = archive.read_bytes()
    for content in whole[:-1000], whole[:5000] + b"\0\1\2" + whole[5003:], whole[:-8] + bytes(8), b"<html>", b"":
        archive.write_bytes(content)
        with pytest.raises(DataError, match=r"tar\.gz: expected a whole archive with cifar-100-binary/train\.bin"):
            cifar100()
    assert verify("cifar100") == {str(archive): "damaged"}


def test_an_archive_of_something_else_is_refused(small_cifar):
    (small_cifar / "test.bin").unlink()
    packed(small_cifar)
    with pytest.raises(DataError, match=r"found another one .*cifar-100-binary/test\.bin"):
        cifar100()


# --- miniImageNet


@pytest.fixture
def small_mini(data, monkeypatch):
    """Three classes, five pictures to train and two to test; returns a function that writes a layout."""
    for name, value in {"CLASSES": 3, "TRAIN": 5, "TEST": 2}.items():
        monkeypatch.setattr(mini, name, value)
    folder = data / "miniimagenet"

    def write(layout):
        rng = np.random.RandomState(0)
        tables = {"train": ["n1", "n3"], "val": ["n2"], "test": []}
        for part, classes in tables.items() if layout == "csv" else ():
            folder.mkdir(exist_ok=True)
            rows = ["filename,label"] + [f"{c}-{k}.png,{c}" for c in classes for k in range(7)]
            (folder / f"{part}.csv").write_text("\n".join(rows) + "\n")
        for name in "n1", "n2", "n3":
            for k in range(7):
                place = {
                    "train and test": folder / ("train" if k < 5 else "test") / name / f"{k}.png",
                    "by class": folder / name / f"{k}.png",
                    "few-shot": folder / ("val" if name == "n2" else "train") / name / f"{k}.png",
                    "csv": folder / "images" / f"{name}-{k}.png",
                }[layout]
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.randint(0, 256, (84, 84, 3), dtype=np.uint8)).save(place)
        return folder

    return write


@pytest.mark.parametrize("layout", ["train and test", "by class", "few-shot", "csv"])
def test_miniimagenet_is_the_same_in_every_layout(small_mini, layout):
    folder = small_mini(layout)
    pictures = miniimagenet()
    drawn = np.random.RandomState(0).randint(0, 256, (3, 7, 84, 84, 3), dtype=np.uint8).transpose(0, 1, 4, 2, 3)
    assert np.array_equal(pictures.train_images.numpy(), drawn[:, :5].reshape(-1, 3, 84, 84))
    assert np.array_equal(pictures.test_images.numpy(), drawn[:, 5:].reshape(-1, 3, 84, 84))
    assert pictures.train_labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert pictures.test_labels.tolist() == [0, 0, 1, 1, 2, 2]
    conditions = verify("miniimagenet")
    assert len(conditions) == 22
    assert set(conditions.values()) == {"ok"}
    assert miniimagenet().train_images is pictures.train_images
    # From now on the decoded file is enough, for other processes too.
    shutil.rmtree(folder)
    mini._miniimagenet.cache_clear()
    assert torch.equal(miniimagenet().test_images, pictures.test_images)
    assert verify("miniimagenet") == {str(folder.with_name("miniimagenet.npy")): "ok"}


def test_the_decoded_file_goes_to_the_cache_where_the_pictures_cannot_be_written_beside(small_mini, monkeypatch):
    folder = small_mini("by class")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    miniimagenet()
    assert [path.name for path in folder.parent.iterdir()] == ["miniimagenet"]
    assert [path.suffix for path in roots()[1].iterdir()] == [".npy"]
    mini._miniimagenet.cache_clear()
    shutil.rmtree(folder / "n1")  # the decoded file is found again
    assert len(miniimagenet().train_images) == 15


def test_damaged_pictures_are_named_all_at_once_and_leave_nothing_behind(small_mini):
    folder = small_mini("train and test")
    truncated, other, small = (folder / "train" / "n1" / f"{k}.png" for k in (0, 2, 4))
    truncated.write_bytes(truncated.read_bytes()[:5000])
    other.write_text("not a picture")
    with pytest.raises(DataError, match=r"found 2 that are not: .*n1/0\.png, .*n1/2\.png; get them again"):
        miniimagenet()
    Image.new("RGB", (84, 83)).save(small)
    with pytest.raises(DataError, match="found 3 that are not"):
        miniimagenet()
    assert [name for name, state in verify("miniimagenet").items() if state == "damaged"] == [
        str(truncated),
        str(other),
        str(small),
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["miniimagenet"]


def test_a_single_picture_of_another_size_is_named(small_mini):
    Image.new("L", (84, 83)).save(small_mini("csv") / "images" / "n2-6.png")
    with pytest.raises(DataError, match=r"n2-6\.png: expected 84 x 84 pixels, found 83 x 84 pixels; resize"):
        miniimagenet()


def test_a_picture_that_the_table_names_but_is_not_there_is_named(small_mini):
    (small_mini("csv") / "images" / "n2-6.png").unlink()
    with pytest.raises(DataError, match=r"n2-6\.png: expected a picture, found no such file"):
        miniimagenet()


@pytest.mark.parametrize(
    ("layout", "spoil", "message"),
    [
        ("by class", lambda f: (f / "n2" / "3.png").unlink(), "expected 7 pictures of class n2, or 5 in .*found 6"),
        ("train and test", lambda f: (f / "test/n2/5.png").rename(f / "train/n2/5.png"), r"class n2.*found 6 \+ 1"),
        ("by class", lambda f: shutil.rmtree(f / "n2"), "expected 3 classes, found 2"),
        ("csv", lambda f: (f / "val.csv").write_text("name\n"), r"val\.csv: expected .*filename,label, found another"),
        ("csv", lambda f: (f / "val.csv").write_text(""), "found an empty file"),
    ],
)
def test_what_is_not_miniimagenet_is_refused(small_mini, layout, spoil, message):
    spoil(small_mini(layout))
    with pytest.raises(DataError, match=message):
        miniimagenet()
    assert "damaged" in verify("miniimagenet").values()


def test_a_decoded_file_that_is_not_whole_is_refused(small_mini):
    decoded = small_mini("by class").with_name("miniimagenet.npy")
    miniimagenet()
    whole = decoded.read_bytes()
    for content in whole[:-1], b"", b"other", whole.replace(b"'|u1'", b"'|i1'"):
        mini._miniimagenet.cache_clear()
        decoded.write_bytes(content)
        with pytest.raises(DataError, match=r"miniimagenet\.npy: expected uint8 .*; remove the file"):
            miniimagenet()
    assert verify("miniimagenet")[str(decoded)] == "damaged"


def test_two_processes_that_decode_at_once_both_end_with_the_whole_file(small_mini):
    folder = small_mini("by class")
    code = f"""
import hashlib, pathlib, sys, time
from rgo.data import mini
mini.CLASSES, mini.TRAIN, mini.TEST = 3, 5, 2
alone, here = mini.decode, pathlib.Path({str(folder)!r}).parent
def decode(files):  # not before both have begun
    (here / sys.argv[1]).touch()
    deadline = time.monotonic() + 60
    while not all((here / name).exists() for name in "ab"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return alone(files)
mini.decode = decode
print(hashlib.sha256(mini.miniimagenet().train_images.numpy().tobytes()).hexdigest())
"""
    commands = [[sys.executable, "-c", code, name] for name in "ab"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    printed = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert printed == {hashlib.sha256(miniimagenet().train_images.numpy().tobytes()).hexdigest() + "\n"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["a", "b", "miniimagenet", "miniimagenet.npy"]


# --- downloads


def test_every_data_set_says_where_it_comes_from_and_under_which_terms():
    assert list(sources()) == ["mnist", "cifar100", "miniimagenet"]
    for name, source in sources().items():
        assert source.name == name
        assert source.url.startswith("https://")
        assert source.licence
        assert source.bytes >= sum(file.bytes for file in source.files)
    for file in sources()["mnist"].files:
        content = (PACKAGED / Path(file.name).name).read_bytes()
        assert len(content) == file.bytes
        assert hashlib.md5(content).hexdigest() == file.md5
        assert hashlib.sha256(content).hexdigest() == file.sha256
    with pytest.raises(ValueError, match="'cifar10' is not a data set: give one of 'mnist', 'cifar100'"):
        fetch("cifar10")


@pytest.fixture
def server(monkeypatch):
    """MNIST from 127.0.0.1. `drop`: bytes after which each connection breaks in turn; `other`: wrong content."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # pooch waits before it tries again

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = b"something else" if site.other else (PACKAGED / Path(self.path).name).read_bytes()
            start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if site.ranges else 0
            site.asked.append((Path(self.path).name, self.headers["Range"]))
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:][: site.drop.pop(0) if site.drop else None])

        def log_message(self, *arguments):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site = SimpleNamespace(
        drop=[], other=False, ranges=True, asked=[], url=f"http://127.0.0.1:{http.server_port}/mnist"
    )
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_data_set_is_downloaded_once(server, data):
    paths = fetch("mnist", mirror=server.url)
    assert paths == [data / "mnist" / name for name, _ in idx_files.FILES]
    assert torch.equal(mnist(data / "mnist").test_images, mnist().test_images)
    assert verify("mnist", data) == dict.fromkeys(map(str, paths), "ok")
    assert len(server.asked) == 4
    fetch("mnist", mirror=server.url)
    assert len(server.asked) == 4
    paths[1].write_bytes(b"damaged")
    paths[2].unlink()
    assert list(verify("mnist", data).values()) == ["ok", "damaged", "missing", "ok"]
    fetch("mnist", mirror=server.url)
    assert [name for name, _ in server.asked[4:]] == [paths[1].name, paths[2].name]
    assert set(verify("mnist", data).values()) == {"ok"}
    assert sorted(path.name for path in (data / "mnist").iterdir()) == sorted(path.name for path in paths)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_connection_is_taken_up_where_it_broke(server, tmp_path, ranges):
    server.drop, server.ranges = [4 << 16, 8 << 16], ranges
    fetch("mnist", tmp_path, mirror=server.url)
    assert set(verify("mnist", tmp_path).values()) == {"ok"}
    first = [asked for name, asked in server.asked if name == "train-images-idx3-ubyte.gz"]
    assert first == [None, f"bytes={4 << 16}-", f"bytes={(12 if ranges else 8) << 16}-"]


def test_a_download_that_failed_is_taken_up_by_the_next_call(server, tmp_path):
    server.drop = [4 << 16]
    with pytest.raises(DataError, match=r"train-images.*expected a download of 9912422 bytes.*try again later, or get"):
        fetch("mnist", tmp_path, mirror=server.url, retries=0)
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == ["train-images-idx3-ubyte.gz.part"]
    fetch("mnist", tmp_path, mirror=server.url)
    assert server.asked[1] == ("train-images-idx3-ubyte.gz", f"bytes={4 << 16}-")
    assert set(verify("mnist", tmp_path).values()) == {"ok"}


@pytest.mark.parametrize("left", [9_912_422, 9_912_423])
def test_what_is_left_of_an_earlier_download_is_checked_too(server, tmp_path, left):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz.part").write_bytes(bytes(left))
    fetch("mnist", tmp_path, mirror=server.url)
    assert set(verify("mnist", tmp_path).values()) == {"ok"}


def test_a_file_with_another_checksum_is_refused_and_not_kept(server, tmp_path):
    server.other = True
    with pytest.raises(DataError, match=r"expected SHA-256 440fcabf.*, found another file at http://127"):
        fetch("mnist", tmp_path, mirror=server.url, retries=1)
    assert len(server.asked) == 2
    assert list((tmp_path / "mnist").iterdir()) == []


def test_a_server_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"train-images.*expected a download.*http://127\.0\.0\.1:9/train-images"):
        fetch("mnist", tmp_path, mirror="http://127.0.0.1:9", retries=0)


def test_what_is_wrong_with_a_mirror_or_a_folder_is_said(tmp_path):
    with pytest.raises(DataError, match=r"Invalid URL 'notaurl/train-images.*No scheme supplied"):
        fetch("mnist", tmp_path, mirror="notaurl", retries=0)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/here/mnist/.*expected a place that can be written, found .*Not a dir"):
        fetch("mnist", tmp_path / "file" / "here", mirror="http://127.0.0.1:9", retries=0)


def test_miniimagenet_is_not_downloaded_but_explained(data, small_mini):
    assert verify("miniimagenet") == {str(data / "miniimagenet"): "missing"}
    with pytest.raises(DataError, match=r"image-net\.org"):
        fetch("miniimagenet")
    small_mini("by class")
    assert fetch("miniimagenet") == []


def test_what_is_not_there_is_missing(data):
    assert verify("cifar100") == {str(data / "cifar-100-binary.tar.gz"): "missing"}
