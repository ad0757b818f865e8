"""Official addresses and published checksums of the data sets that can be downloaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    url: str
    checksum: str | None
    """"md5:..." or "sha256:..."; None where the publisher gives none."""
    unpack: bool = False

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Source:
    page: str
    """For people: what the data set is."""
    files: tuple[File, ...]
    folder: str = ""
    """Files are put into this folder inside the data directory, archives unpacked there."""


TORONTO = "https://www.cs.toronto.edu/~kriz/"
LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"
IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _archive(url: str, md5: str) -> tuple[File, ...]:
    return (File(url, f"md5:{md5}", unpack=True),)


def _idx(base: str, *sums: str) -> tuple[File, ...]:
    return tuple(File(base + n, f"md5:{s}") for n, s in zip(IDX_NAMES, sums, strict=True))


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        TORONTO + "cifar.html",
        _archive(TORONTO + "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    "cifar100": Source(
        TORONTO + "cifar.html",
        _archive(TORONTO + "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    ),
    "mnist": Source(
        "http://yann.lecun.com/exdb/mnist/",
        _idx(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        "mnist",
    ),
    "fashion-mnist": Source(
        "https://github.com/zalandoresearch/fashion-mnist",
        _idx(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        "fashion-mnist",
    ),
    "kmnist": Source(
        "http://codh.rois.ac.jp/kmnist/",
        _idx(
            "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
            "bdb82020997e1d708af4cf47b453dcf7",
            "e144d726b3acfaa3e44228e80efcd344",
            "5c965bf0a639b31b8f53240b1b52f4d7",
            "7320c461ea6c1c855c0b718fb2a4b134",
        ),
        "kmnist",
    ),
    "emnist": Source(
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        _archive(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "58c8d27c78d21e728a6bc7b3cc06412e",
        ),
        "emnist",
    ),
    "shakespeare": Source(
        "https://github.com/karpathy/char-rnn",
        (
            File(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
        "shakespeare",
    ),
    "a9a": Source(LIBSVM, (File(LIBSVM + "a9a", None), File(LIBSVM + "a9a.t", None)), "a9a"),
    "w8a": Source(LIBSVM, (File(LIBSVM + "w8a", None), File(LIBSVM + "w8a.t", None)), "w8a"),
}
