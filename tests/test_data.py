import gzip
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import rgo.data
from rgo.data import DataError, mnist, read_idx

PACKAGED = Path(rgo.data.__file__).parent / "datasets" / "mnist"


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
