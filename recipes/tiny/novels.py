"""Six novels by Jane Austen, read out of Debian's `r-cran-janeaustenr` package without R.

The texts are in the public domain; the package around them is MIT-licensed. Its data file is a sequence of
compressed R objects: four bytes of length, a letter for the compression, then a zlib stream in which every line of
the novel is a length-prefixed string (R's XDR serialisation, CHARSXP entries).

    python -m recipes.tiny.novels --out recipes/tiny/out/novels.txt
"""

import argparse
import re
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_CHARSXP = 9


def read_objects(rdb: bytes) -> list[bytes]:
    """The decompressed R objects of an .rdb file; what is not zlib is passed over."""
    found, position = [], 0
    while position + 5 < len(rdb):
        for skip in (4, 5):
            stream = zlib.decompressobj()
            try:
                found.append(stream.decompress(rdb[position + skip :]))
            except zlib.error:
                continue
            position = len(rdb) - len(stream.unused_data)
            break
        else:
            position += 1
    return found


def read_strings(data: bytes) -> list[str]:
    """The character vector inside one serialised R object."""
    header = struct.pack(">I", 16)      # STRSXP without attributes
    start = data.find(header)
    assert start >= 0, "the object holds no character vector"
    (count,) = struct.unpack(">I", data[start + 4 : start + 8])
    position, lines = start + 8, []
    for _ in range(count):
        flags, size = struct.unpack(">Ii", data[position : position + 8])
        assert flags & 255 == _CHARSXP, f"entry {len(lines)} of {count} is not a string"
        position += 8
        size = max(size, 0)             # -1 is R's NA
        lines.append(data[position : position + size].decode("utf-8"))
        position += size
    return lines


def paragraphs(lines: list[str]) -> list[str]:
    """Join wrapped lines; blank lines part paragraphs; underscores for italics go."""
    text = "\n".join(lines)
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part.replace("_", "") for part in parts if len(part) > 20]


def extract(deb: Path) -> list[list[str]]:
    """The paragraphs of each novel."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", str(deb), folder], check=True)
        rdb = (Path(folder) / DATA).read_bytes()
    return [paragraphs(read_strings(data)) for data in read_objects(rdb)]


def download(folder: Path) -> Path:
    """Fetch the package with apt; needs the lists of `apt-get update`."""
    subprocess.run(["apt-get", "download", PACKAGE], check=True, cwd=folder)
    return next(folder.glob(PACKAGE + "_*.deb"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb", type=Path, help="a package already downloaded")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        novels = extract(arguments.deb or download(Path(folder)))
    arguments.out.write_text("\n\n\n".join("\n".join(novel) for novel in novels), encoding="utf-8")
    for novel in novels:
        print(f"{len(novel):6d} paragraphs  {sum(map(len, novel)):8d} characters  {novel[0][:50]!r}")


if __name__ == "__main__":
    main()
