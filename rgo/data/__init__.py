"""Data sets as arrays in memory: files found, checked whenever they are read, and fetched when asked for.

MNIST ships inside the package. The others are looked for in `$RGO_DATA`, then in the user's cache directory
(`roots()` says which); `sources()` lists them, `fetch` downloads, `verify` says what is missing or damaged.
Nothing is ever unpickled.
"""

from rgo.data.cifar import CIFAR100, cifar100
from rgo.data.files import DataError, roots
from rgo.data.idx import MNIST, mnist, read_idx
from rgo.data.images import read_image
from rgo.data.mini import MiniImageNet, miniimagenet
from rgo.data.sources import File, Source, fetch, sources, verify

__all__ = [
    "CIFAR100",
    "MNIST",
    "DataError",
    "File",
    "MiniImageNet",
    "Source",
    "cifar100",
    "fetch",
    "miniimagenet",
    "mnist",
    "read_idx",
    "read_image",
    "roots",
    "sources",
    "verify",
]
