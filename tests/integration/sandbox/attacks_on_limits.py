"""Programs that take all they can, processes, memory, disk, output and time, or that do not end."""

PROGRAMS = r"""
#: fork bomb | language=bash stopped=time seconds=1
:(){ :|:& };:; sleep 100
#: signals to everybody
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP, signal.SIGSEGV):
    os.kill(1, number)
refused(os.kill, os.getppid() if os.getppid() > 1 else 70000, signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
refused(os.kill, -1, signal.SIGTERM)
os.killpg(0, signal.SIGTERM)
for pid in range(1, 40000):
    if pid != os.getpid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
#: exit code forged
for path in ("/proc/1/mem", f"/proc/{os.getppid()}/mem", "/proc/self/mem"):
    refused(open, path, "rb+")
first = os.pidfd_open(1)
for fd in range(3, 64):
    taken = libc.syscall(438, first, fd, 0)
    if taken >= 0:
        leak(f"descriptor {fd} of the first process: {os.readlink(f'/proc/self/fd/{taken}')}")
#: signals ignored | stopped=time seconds=1
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
#: daemon that outlives
if os.fork() == 0:
    os.setsid()
    libc.prctl(1, 0)
    if os.fork() == 0:
        os.closerange(0, 100)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1000)
    os._exit(0)
#: daemon that holds the output
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
#: daemons that keep being born
def live():
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
if os.fork() == 0:
    libc.prctl(36, 1)
    live()
#: memory of many | stopped=memory memory=128
import mmap
for _ in range(12):
    if os.fork() == 0:
        block = mmap.mmap(-1, 60 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(60):
            block.write(b"x" * (1 << 20))
        signal.pause()
signal.pause()
#: memory of no process
import mmap
def shared(fd):
    block = mmap.mmap(fd, 1 << 20)
    block.write(bytes(1 << 20))
    block.madvise(mmap.MADV_DONTNEED)
    return "held by the kernel alone"
refused(shared, -1)
with open("/dev/zero", "rb+", buffering=0) as zero:
    refused(shared, zero.fileno())
    if zero.read(1000) != bytes(1000):
        leak("/dev/zero has no zeros")
#: disk
for folder, most in (("/tmp", 64), ("/dev/shm", 16)):
    with contextlib.suppress(OSError):
        for number in range(most + 1):
            with open(f"{folder}/{number}", "wb") as file:
                file.write(bytes(1 << 20))
        leak(f"{most + 1} MB in {folder}")
    for path in glob.glob(f"{folder}/[0-9]*"):
        os.unlink(path)
#: millions of files | stopped=somehow seconds=2
number = 0
while True:
    number += 1
    try:
        os.mknod(f"/tmp/{number}")
    except OSError:
        os.mkdir(f"/dev/shm/{number}")
#: flood of both, endless | stopped=time seconds=1
threading.Thread(target=lambda: [sys.stderr.write("x" * 100_000) for _ in iter(int, 1)]).start()
while True:
    sys.stdout.write("x" * 100_000)
"""
