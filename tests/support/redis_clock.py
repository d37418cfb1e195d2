"""A redis-server whose clock can be set while it runs, by a preloaded library that adds an offset to the time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
    static volatile long *seconds;
    if (!seconds) {
        int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
        seconds = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    }
    return *seconds;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(at, zone);
    at->tv_sec += offset();
    return result;
}
time_t time(time_t *at) {
    struct timeval now;
    gettimeofday(&now, 0);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec += offset();
    return result;
}
"""


class RedisClock:
    """What a redis-server needs in its environment, and its clock."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("the clock of a redis-server is set by a library that is compiled here; there is no C compiler")
        self._offset = folder / "offset"
        self._offset.write_bytes(bytes(8))
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def set(self, seconds: int) -> None:
        """Set the clock this much ahead of the true time."""
        with self._offset.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))
